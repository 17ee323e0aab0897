"""Time that Ray adds to a suite of 60 cases beyond its start-up, with workers that take no time.

    python benchmarks/fleet/overhead.py

The workers are real Ray actors on this machine's CPU slots that return synthetic results, so only
Ray, the coordinator and the database are measured. The limit is 10 s.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from flexq_bench.db.engine import open_database
from flexq_bench.db.records import CommitInfo, DeviceInfo, RunInfo
from flexq_bench.fleet import RayPool, RayWorkers, Times, Work
from flexq_bench.fleet.ray_workers import WorkerDescription
from flexq_bench.fleet.workers import Report
from flexq_bench.measure import Measured
from flexq_bench.runs.lifecycle import open_run
from flexq_bench.runs.worker import Worker
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

CASES = 60
COMMIT = CommitInfo("a" * 40, None, 1, dirty=False)


def instant_worker() -> type:
    """A class of its own each time, so that Ray carries it to its processes by value."""

    class InstantWorker:
        def __init__(self, backend: str, seed: int, tuning: str) -> None:
            import os

            self._worker = Worker(DeviceInfo("CPU-1", "A CPU", "cpu"), {}, None, os.getpid())

        def describe(self) -> WorkerDescription:
            return WorkerDescription(self._worker, "made")

        def memory_obstacles(self, cases: tuple[Case, ...]) -> dict[str, str]:
            return {}

        def measure(self, case: Case, choices: tuple[object, ...]) -> Report:
            return Report(Measured("ok", "", 0, 1, "normal-v1", median_us=20.0, n_samples=50))

    return InstantWorker


def main() -> None:
    cases = [Case("flexq-w6a6", GemmWorkload(m, 256, 256)) for m in range(1, CASES + 1)]
    times, began = Times(), time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        open_database(str(Path(folder) / "flexq.sqlite")) as database,
        RayPool(
            database,
            RayWorkers("local", backend="cpu", seed=0, times=times, actor=instant_worker()),
            COMMIT,
            times,
        ).opened() as pool,
    ):
        ready = time.perf_counter()
        keys = tuple(case.key for case in cases)
        run = RunInfo(
            "made", "made", "manual", "running", "2025-11-21T10:00:00+00:00", "made", keys
        )
        with open_run(database, run, COMMIT) as opened:
            pool.measure([Work(opened, pool.kinds[0].gpu, cases)], lambda record: None)
        done = time.perf_counter()
    print(  # noqa: T201
        f"start-up {ready - began:.1f} s; {CASES} cases {done - ready:.2f} s; "
        f"stopping {time.perf_counter() - done:.1f} s"
    )


if __name__ == "__main__":
    main()
