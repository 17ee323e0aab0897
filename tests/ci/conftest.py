"""A gate on made comparisons, with a database of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from ci.gate_perf import GateReport, gate_perf
from ci.policy import load_policy
from db.engine import Database
from db.records import DeviceInfo
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
