"""Performance gates and nights on made-up measurements."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # its helper: made_nights

from made_nights import SUITE, MadePool, unseen

from flexq_bench.ci.gate_perf import gate_perf
from flexq_bench.ci.nightly import Rules, conclude_nights, measure_night
from flexq_bench.ci.policy import load_policy
from flexq_bench.ci.report_data import GateReport
from flexq_bench.db.engine import Database
from flexq_bench.db.records import DeviceInfo
from flexq_bench.runs.machine import Machine

POLICY = """
version = 1
suite = "smoke"
slower_percent = 2
owner = "kernels"
"""
TODAY = date(2026, 1, 15)


@pytest.fixture
def gate(database: Database, tmp_path: Path, commits, sha) -> Callable[..., GateReport]:
    """gate(comparison, …, plan=[…], policy="[[limit]]…"): the report on what came back.

    plan: cases; by default those of the comparisons.
    """

    def run(*comparisons, plan=None, policy: str = "", alerting: bool = False) -> GateReport:
        path = tmp_path / "gate.toml"
        path.write_text(POLICY + policy)
        return gate_perf(
            load_policy(str(path)),
            plan or [compared.case for compared in comparisons],
            lambda cases: iter(comparisons),
            database,
            Machine("cpu", DeviceInfo("CPU-1", "A CPU", "cpu")),
            commits[sha(1)],
            commits[sha(2)],
            alerting=alerting,
            today=TODAY,
        )

    return run


@pytest.fixture
def a_night(database, commits, sha, compared, monkeypatch):
    """a_night(3): the third commit's night; us: what a case takes there."""
    monkeypatch.setattr("flexq_bench.ci.nightly.commit_at", lambda root, one: commits[one])

    def run(order, *, us=20.0, name=None, gpus=("A CPU",), pool=None, canaries=0, **options):
        commit = commits[sha(order)]
        pool = pool or MadePool(database, commit, compared, us, gpus)
        rules = Rules(name or f"2025-11-{order:02}", Path(), canaries=canaries, **options)
        infos = measure_night(database, pool, SUITE, commit, rules, progress=unseen)
        return pool, conclude_nights(database, pool, infos, commit, rules, progress=unseen)

    return run


@pytest.fixture(scope="session")
def kept_nights() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as kept:
        yield kept


@pytest.fixture
def seven_nights(a_night, database: Database, kept_nights: sqlite3.Connection) -> None:
    """Seven nights of the same times, made once and copied."""
    is_new = kept_nights.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    for order in range(1, 8) if is_new else ():
        a_night(order)
    with database.engine.connect() as connection:
        file: Any = connection.connection.driver_connection
        copied, to = (file, kept_nights) if is_new else (kept_nights, file)
        copied.backup(to)
