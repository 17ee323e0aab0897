"""Nights of a project on two kinds of device, at every commit of the sample's seeded history."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from simulated_project import simulated_devices

from flexq_bench.ci.nightly import Rules, conclude_nights, measure_night
from flexq_bench.cli.external import use_project
from flexq_bench.db import queries
from flexq_bench.db.records import DeviceInfo
from flexq_bench.fleet import RayPool, RayWorkers, Times
from flexq_bench.fleet.shipped_kernels import ship_kernels
from flexq_bench.measure import external_kernels
from flexq_bench.repository.git import git_output
from flexq_bench.repository.project import revision
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.plan import build_plan

SCRIPT = Path(__file__).parents[2] / "examples" / "byo" / "make_repository.py"
KINDS = ("A100", "H200")
TIMES = Times(start=180, case=30, beat=2, lease=60, device=60, scan=1, compare=120)
FIRST, LAST = 6, 15  # commits: `slower` is the 11th, `fast-again` the 15th


@pytest.fixture
def project(tmp_path, monkeypatch, load_module):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    load_module(SCRIPT).make(tmp_path / "acme", ("torch",), shape="256x256")
    yield use_project(str(tmp_path / "acme"), "HEAD")
    external_kernels.forget()


def identities_of(suite):
    """Fields that make a series, of each kernel that the suite plans."""
    machine = Machine("cuda", DeviceInfo("GPU-1", KINDS[0], "cuda"))
    names = ("protocol_version", "input_distribution", "kernel_version")
    names += ("weight_bits", "act_bits", "group")
    cases = {case.kernel: case for case in build_plan(suite, "cuda", (8, 6)).cases}
    series = {kernel: machine.series_of(case) for kernel, case in cases.items()}
    return {kernel: {name: of[name] for name in names} for kernel, of in series.items()}


def unseen(total):
    return nullcontext(lambda result: None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # Ray's own pipes
def test_nights_name_the_seeded_commits_once_on_each_kind(project, database, a_cluster, add_node):
    for kind in KINDS:
        add_node(a_cluster, kind, 1)
    root = project.project.root
    shas = git_output(root, "rev-list", "--reverse", "HEAD").splitlines()
    slower, fixed = (git_output(root, "rev-parse", tag) for tag in ("slower", "fast-again"))
    suite = project.suite()
    meter, comparer = simulated_devices(identities_of(suite))
    opened, closed, missing = [], [], []
    for number in range(FIRST, LAST + 1):
        tonight = revision(project.project, shas[number - 1])
        workers = RayWorkers(
            a_cluster.address,
            backend="cuda",
            seed=0,
            times=TIMES,
            actor=meter,
            comparer=comparer,
            kernels=partial(ship_kernels, (), project.project, tonight, TIMES),
            project=project.project,
        )
        night = replace(Rules(f"2026-02-{number:02}", root), canaries=1)
        with RayPool(database, workers, tonight.commit, TIMES).opened() as pool:
            nights = measure_night(database, pool, suite, tonight.commit, night, progress=unseen)
            for report in conclude_nights(
                database, pool, nights, tonight.commit, night, progress=unseen
            ):
                missing += [(number, report.gpu)] if report.outcome != "complete" else []
                opened += [tonight.commit.sha] * len(report.opened)
                closed += [tonight.commit.sha] * len(report.fixed)

    assert missing == []
    # One alert for both kinds: the second joins it.
    assert (opened, closed) == ([slower], [fixed])
    with database.session() as session:
        [alert] = queries.alerts(session)
    assert (alert.bad.sha, alert.gpus, alert.state) == (slower, KINDS, "fixed")
