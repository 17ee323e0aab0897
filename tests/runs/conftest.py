"""Cases, results and a pool that measures nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.fleet import request_worker
from flexq_bench.fleet.local_pool import LocalPool
from flexq_bench.measure import Measured
from flexq_bench.runs import transactions
from flexq_bench.runs.process_meter import InProcessMeter
from flexq_bench.runs.worker import Worker
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

sys.path.insert(0, str(Path(__file__).parent))  # its helper `serving`

MEASURED = Measured(
    status="ok",
    detail="",
    seed=0,
    protocol_version=1,
    input_distribution="normal-v1",
    kernel_version=1,
    weight_bits=6,
    act_bits=6,
    group=128,
    median_us=20.0,
    ci_low_us=19.9,
    ci_high_us=20.1,
    n_samples=50,
    floor_us=10.0,
    launch_us=2.0,
    exact=True,
)
WORKER = Worker(DeviceInfo("CPU-1", "A CPU", "cpu"), {"host": "here"}, None, pid=1)
COMMIT = CommitInfo("a" * 40, None, 1, dirty=False)


def make_case(kernel: str = "flexq-w6a6", m: int = 1, n: int = 256, k: int = 256) -> Case:
    return Case(kernel, GemmWorkload(m, n, k), model="llama-7b", layer="o_proj")


def make_measured(**changes: object) -> Measured:
    return replace(MEASURED, **changes)


@dataclass
class ScriptedMeter:
    """Answers each case by a script: a result to give, or an exception to raise."""

    script: Callable[[Case], Measured | BaseException]
    backend: str = "cpu"
    capability: None = None
    seed: int = 0
    device_info: DeviceInfo = WORKER.device
    environment: dict[str, str] = field(default_factory=lambda: {"host": "here"})

    def check_memory(self, case: Case) -> None:
        pass

    def measure(self, case: Case) -> Measured:
        answer = self.script(case)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def a_case():
    return make_case


@pytest.fixture
def a_result():
    return make_measured


@pytest.fixture
def a_pool(database):
    """a_pool(script): this process as a pool, which measures by the script."""
    return lambda script: LocalPool(database, InProcessMeter(ScriptedMeter(script)), "cpu")


@pytest.fixture
def commit() -> CommitInfo:
    return COMMIT


@pytest.fixture
def worker() -> Worker:
    return WORKER


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outages are looked at, and leases renewed, many times a second."""
    monkeypatch.setattr(transactions, "RETRY_INTERVAL_S", 0.001)
    monkeypatch.setattr(request_worker, "HEARTBEAT_S", 0.02)
