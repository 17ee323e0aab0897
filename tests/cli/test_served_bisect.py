"""`bisect` over the commits of an engine: a project with a build and a serve command."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import pytest

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.served.speed import commits as speed_commits
from flexq_bench.verdicts import CaseComparison, Comparison, confirm

SERVER = Path(__file__).parents[1] / "served" / "server.py"
PROJECT = f"""
version = 1
name = "engine"

[build]
command = "cp tpot.txt built.txt"

[serve]
command = "{sys.executable} serve.py --port {{port}} --ttft-ms 2 --model m"
policy = "served.toml"
ready_within_s = 30.0
"""
POLICY = """
version = 1

[[speed]]
name = "short"
lengths = "fixed"
prompt_tokens = 4
new_tokens = 12
concurrency = 4
requests = 4
warmup_requests = 4
cooldown_s = 0.0
worse_percent = 10.0
metrics = ["median_tpot", "tokens_per_s"]
"""
SERVE = """
import runpy, sys
from pathlib import Path
sys.argv += ["--tpot-ms", Path("built.txt").read_text().strip()]
runpy.run_path("server.py", run_name="__main__")
"""
LOAD = "load=short,lengths=fixed,prompt=4,new=12,arrivals=closed-4,requests=4"
CASE = f"m op hot serving:{LOAD},metric=median_tpot"


@pytest.fixture
def engine(tmp_path, git, monkeypatch):
    """A repository of five commits, of which the third makes the engine 30 % slower."""
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "engine"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    shutil.copy(SERVER, folder / "server.py")
    (folder / "serve.py").write_text(SERVE)
    (folder / "flexq-bench.toml").write_text(PROJECT)
    (folder / "served.toml").write_text(POLICY)
    shas = []
    for number, tpot in enumerate((3.0, 3.0, 3.9, 3.9, 3.9)):
        (folder / "tpot.txt").write_text(f"{tpot}")
        (folder / "notes.txt").write_text(f"{number}")
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", f"change {number}")
        shas.append(git(folder, "rev-parse", "HEAD"))
    return folder, shas


def bisected(cli, engine, case=CASE, *more):
    folder, shas = engine
    ends = ("--good", shas[0], "--bad", shas[-1], "--project", str(folder))
    return cli("bisect", case, *ends, "--backend", "cpu", *more)


def test_slower_commit_of_an_engine_is_named(cli, engine, monkeypatch):
    shas = engine[1]

    def compare(_project, base, head, case, **_):
        slower = 0.26 * (shas.index(head) >= 2)
        head_us = tuple(math.exp(slower + 0.001 * (i % 3)) for i in range(24))
        comparison = Comparison((1.0,) * 24, head_us, tuple(range(24)))
        return CaseComparison(case, base, head, comparison, confirm(comparison))

    monkeypatch.setattr(speed_commits, "compare_engines", compare)

    ran = bisected(cli, engine)

    assert ran.code == 1, ran.err
    assert f"{shas[2][:10]} change 2" in ran.out


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (CASE.replace("new=12", "new=13"), "no load of the policy"),
        (CASE.replace("median_tpot", "p99_tpot"), "no load of the policy"),
    ],
)
def test_case_of_another_load_is_a_usage_error(cli, engine, case, reason):
    ran = bisected(cli, engine, case)

    assert ran.code == 2
    assert reason in ran.err


def test_speed_of_engines_needs_a_project(cli, engine):
    ran = cli("bisect", CASE, "--good", "HEAD~1", "--bad", "HEAD")

    assert ran.code == 2
    assert "--project" in ran.err


def test_project_needs_kernels_or_an_engine(cli, engine):
    folder, _ = engine
    text = (folder / "flexq-bench.toml").read_text()
    (folder / "flexq-bench.toml").write_text(text[: text.index("[serve]")])

    ran = bisected(cli, engine)

    assert ran.code == 2
    assert "kernels is missing" in ran.err


@pytest.fixture
def gated(cli, engine):
    """`gate served` on the first commits of the engine: equal ones, or the slower one."""
    folder, shas = engine

    def run(head, *more):
        ends = ("--base", shas[0], "--head", shas[head], "--project", str(folder))
        return cli("gate", "served", *ends, *more)

    return run


@pytest.mark.slow
def test_gate_of_a_projects_engine_stores_series_and_an_alert(gated, engine, database, cli):
    ran = gated(2, "--alert")

    assert ran.code == 1, ran.err
    with open_database(str(database)) as opened, opened.session() as session:
        series = [row for row in queries.list_series(session) if row.project == "engine"]
        alerts = queries.alerts(session)
    rows = {row.metric: row for row in series}
    assert len(rows) == len(series)  # verdicts are of the series of the results
    assert {"median_tpot", "p99_ttft", "tokens_per_s"} <= set(rows)
    assert (rows["median_tpot"].direction, rows["tokens_per_s"].direction) == ("lower", "higher")
    assert [alert.state for alert in alerts] == ["new"]
    named = bisected(cli, engine, str(rows["median_tpot"].id))
    assert f"{engine[1][2][:10]} change 2" in named.out, named.err


@pytest.mark.slow
def test_gate_of_equal_commits_passes(gated, engine):
    ran = gated(1)

    assert ran.code == 0, ran.out + ran.err
    assert all(sha[:10] in ran.out for sha in engine[1][:2])


@pytest.mark.slow
def test_engines_of_commits_are_built_served_and_searched(cli, engine):
    ran = bisected(cli, engine)

    assert ran.code == 1, ran.err
    assert f"{engine[1][2][:10]} change 2" in ran.out
