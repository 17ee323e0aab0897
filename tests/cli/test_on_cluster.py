"""`--cluster` of `compare`, `gate perf` and `bisect`: their comparisons are stored jobs."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from sqlalchemy import select

import flexq_bench.fleet
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import DeviceInfo
from flexq_bench.db.tables import Decision, Device
from flexq_bench.errors import BrokenRevisionError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.fleet.local_pool import carry_out_comparisons
from flexq_bench.fleet.pool import Kind
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.worker import Worker
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import is_probe

CASE = "cublas-fp16 gemm hot m1n32k32"
CLUSTER = ("--cluster", "ray://127.0.0.1:1", "--backend", "cpu")
SUITE = (
    'description = "mine"\n[[group]]\nkernels = ["cublas-fp16"]\nm = "1,2"\nshapes = ["32x32"]\n'
)
POLICY = 'version = 1\nsuite = "mine.toml"\nslower_percent = 2\n'


@dataclass
class MadeCluster:
    """A pool whose comparisons are made up. ratios: of a head's times, by head; 1: of others."""

    compared: object
    gpus: tuple[str, ...] = ("A CPU",)
    ratios: dict[str, object] = field(default_factory=dict)
    asked: list[object] = field(default_factory=list)
    works: list[object] = field(default_factory=list)
    options: object = None

    @property
    def kinds(self):
        return [Kind(gpu, "cpu", None, 2, 2) for gpu in self.gpus]

    def machine(self, gpu):
        return Machine("cpu", DeviceInfo("CPU 1", gpu, "cpu"))

    def compare(self, works, on_compared):
        worker = Worker(DeviceInfo("CPU 2", works[0].gpu, "cpu"), {"host": "there"}, None, 1)
        self.works += works
        carry_out_comparisons(self.database, worker, works, self._compare, on_compared)

    def _compare(self, job, work):
        self.asked.append(job)
        ratio = self.ratios.get(job.head, 1.0)
        if isinstance(ratio, Exception):
            raise ratio
        return [
            replace(self.compared(case.kernel, made), case=case, base=job.base, head=job.head)
            for case in job.cases
            for made in [1.0 if is_probe(case.kernel) else ratio]
        ]


@pytest.fixture
def cluster(compared, monkeypatch):
    made = MadeCluster(compared)

    @contextmanager
    def opened(database, options, commit):
        made.database, made.options = database, options
        yield made

    monkeypatch.setattr(flexq_bench.fleet, "open_pool", opened)
    return made


@pytest.fixture
def commits(checkout, tmp_path, monkeypatch):
    """Six commits that look like ours, oldest first; the current folder is their checkout."""
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine.toml").write_text(SUITE)
    (tmp_path / "gate.toml").write_text(POLICY)
    return checkout(6)


def stored_run(database):
    with open_database(str(database)) as opened, opened.session() as session:
        [run] = queries.runs(session)
        return run, queries.jobs_of(session, run.uuid, kind="compare")


def test_compare_stores_jobs_that_all_devices_share(cli, cluster, commits, database, tmp_path):
    cluster.ratios = {commits[-1]: 1.2}

    ran = cli(
        "compare", commits[0], "HEAD", "--suite", str(tmp_path / "mine.toml"), *CLUSTER, "--json"
    )

    document = json.loads(ran.out)
    assert (ran.code, document["device"]) == (ExitCode.REGRESSION, "A CPU")
    assert (document["base"], document["head"]) == (commits[0], commits[-1])
    assert [len(case["case"]) > 0 for case in document["cases"]] == [True, True]
    run, jobs = stored_run(database)
    assert (run.suite, run.status, run.commit) == ("compare", "complete", commits[-1])
    assert [job.state for job in jobs] == ["done", "done"]


def test_working_tree_is_named_as_on_one_device(cli, cluster, commits, tmp_path):
    (tmp_path / "checkout" / "flexq_bench" / "__init__.py").write_text("changed = 1\n")

    ran = cli("compare", "HEAD", ".", "--suite", str(tmp_path / "mine.toml"), *CLUSTER, "--json")

    document = json.loads(ran.out)
    assert document["head"] == f"{commits[-1]}-dirty"
    assert cluster.asked[0].head not in commits


def test_two_kernels_are_compared_without_commits(cli, cluster):
    shape = ("--m", "4", "--stage", "gemm")

    ran = cli("compare", "flexq-w6a6", "abq-w6a6", *shape, *CLUSTER)

    assert ran.code == ExitCode.PASS
    assert {(job.base, job.head, job.kernels) for job in cluster.asked} == {
        ("flexq-w6a6", "abq-w6a6", True)
    }


def test_several_kinds_need_a_choice(cli, cluster, commits, tmp_path):
    cluster.gpus = ("A CPU", "B CPU")

    ran = cli("compare", commits[0], "HEAD", "--suite", str(tmp_path / "mine.toml"), *CLUSTER)

    assert ran.code == ExitCode.USAGE
    assert "A CPU, B CPU" in ran.error
    assert "--gpus" in ran.error


@pytest.mark.parametrize("trusts", [False, True])
def test_gate_judges_stored_comparisons(cli, cluster, commits, database, tmp_path, trusts):
    cluster.ratios = {commits[-1]: 1.2}
    options = ("--policy", str(tmp_path / "gate.toml"), *(["--trust-head"] if trusts else []))

    ran = cli("gate", "perf", "--base", commits[0], *options, *CLUSTER, "--processes", "2")

    assert ran.code == ExitCode.REGRESSION, ran.err
    assert {job.judged for job in cluster.asked} == {not trusts}
    [rules] = [work.rules for work in cluster.works]
    assert (rules.processes, rules.suffices is None) == (2, False)
    run, jobs = stored_run(database)
    assert (run.suite, {job.state for job in jobs}) == ("gate", {"done"})
    with open_database(str(database)) as opened, opened.session() as session:
        devices = set(session.scalars(select(Device.uuid).join(Decision)))
    assert devices == {"CPU 2"}  # that compared, not the first of the kind


@pytest.mark.parametrize(
    "verb", [("compare", "HEAD~1", "HEAD"), ("gate", "perf", "--base", "HEAD~1")]
)
def test_kinds_without_a_cluster_are_refused(cli, commits, verb):
    ran = cli(*verb, "--device", "cpu", "--gpus", "A CPU")

    assert ran.code == ExitCode.USAGE
    assert "--gpus is for a cluster" in ran.error


def test_gate_on_a_cluster_keeps_the_sandbox(cli, cluster, commits):
    ran = cli("gate", "perf", "--base", commits[0], *CLUSTER, "--no-sandbox")

    assert ran.code == ExitCode.USAGE


def test_bisection_skips_commits_that_do_not_build(cli, cluster, commits, database):
    slow = dict.fromkeys(commits[3:], 1.3)
    cluster.ratios = slow | {commits[2]: BrokenRevisionError("does not build")}

    ran = cli("bisect", CASE, "--good", commits[0], "--bad", commits[-1], *CLUSTER, "--json")

    document = json.loads(ran.out)
    assert ran.code == ExitCode.AMBIGUOUS
    assert document["suspects"] == [commits[2], commits[3]]
    run, jobs = stored_run(database)
    assert run.suite == "bisect"
    assert len(jobs) == len(cluster.asked)
    assert {job.state for job in jobs} == {"done", "refused"}


def test_bisection_of_a_series_uses_its_kind(cli, cluster, commits, monkeypatch):
    monkeypatch.setattr(
        "flexq_bench.cli.bisect.case_of_series",
        lambda *_: (Case.from_key(CASE), "B CPU"),
    )
    cluster.gpus = ("A CPU", "B CPU")

    ran = cli("bisect", "7", "--good", commits[0], "--bad", commits[-1], *CLUSTER)

    assert ran.code == ExitCode.USAGE  # this pool does not choose
    assert cluster.options.gpus == ("B CPU",)
