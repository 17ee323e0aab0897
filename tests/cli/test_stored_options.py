"""Options that are stored with runs, and resuming without repeating them."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.exit_codes import INTERRUPTED, ExitCode
from flexq_bench.measure import Meter

TINY = ("sweep", "--kernels", "cublas-fp16", "--m", "1", "--n", "32", "--k", "32")
SUITE = """
description = "one GEMM"
source = "made"

[[group]]
kernels = ["cublas-fp16"]
shapes = ["32x32"]
m = "1"
"""


@contextmanager
def interrupted_after(count):
    measure, calls = Meter.measure, []

    def interrupting(self, case):
        calls.append(case)
        if len(calls) > count:
            raise KeyboardInterrupt
        return measure(self, case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meter, "measure", interrupting)
        yield


def stored_options(path):
    with open_database(str(path)) as database, database.session() as session:
        return {run.uuid: queries.run_options(session, run.uuid) for run in queries.runs(session)}


def test_run_stores_the_options_that_were_given(cli, database, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_TIMES", "case=99")

    cli(*TINY, "--backend", "cpu", "--seed", "7", "--no-tune", "--db", str(database))

    [options] = stored_options(database).values()
    assert options == {"backend": "cpu", "seed": 7, "no_tune": True, "times": "case=99"}


def test_resumed_run_takes_stored_options_unless_given(cli, database, monkeypatch):
    with interrupted_after(1):
        assert cli(*TINY, "--seed", "7", "--no-tune").code == INTERRUPTED
    [run] = stored_options(database)
    used = []
    monkeypatch.setattr(
        "flexq_bench.cli.measuring.resume_run",
        lambda prefix, suite, options: used.append(options.pool) or 0,
    )

    cli("run", "--resume", run[:8])
    cli("run", "--resume", run[:8], "--seed", "8")

    assert [(pool.seed, pool.tuning.value) for pool in used] == [(7, "none"), (8, "none")]


def test_interrupted_night_is_resumed_by_its_run_alone(cli, database, tmp_path, monkeypatch):
    suite = tmp_path / "mine.toml"
    suite.write_text(SUITE)
    (tmp_path / "reports").mkdir()
    monkeypatch.chdir(tmp_path)
    night = ("nightly", "mine.toml", "--night", "one", "--canaries", "0", "--report", "reports")
    with interrupted_after(1):
        ran = cli(*night, "--backend", "cpu", "--seed", "3")
    [run] = stored_options(database)
    assert ran.code == INTERRUPTED
    assert f"nightly --resume {run[:8]}" in ran.err
    monkeypatch.chdir("/")

    resumed = cli("nightly", "--resume", run[:8], "--json")

    assert resumed.code == ExitCode.PASS, resumed.err
    [report] = json.loads(resumed.out)
    assert (report["night"], report["received"]) == ("one", report["planned"])
    assert (tmp_path / "reports" / "nightly.md").is_file()
    with open_database(str(database)) as opened, opened.session() as session:
        assert {record.seed for record in queries.run_records(session, run)} == {3}


def test_run_of_no_night_is_not_resumed_as_one(cli, database):
    cli(*TINY)
    [run] = stored_options(database)

    assert "is of no night" in cli("nightly", "--resume", run[:8]).error
