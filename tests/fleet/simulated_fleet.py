"""A coordinator of simulated GPUs.

    python simulated_fleet.py ADDRESS DATABASE CASES SECONDS KIND...

ADDRESS: of a Ray cluster whose nodes declare GPUs with an accelerator type. So many cases are
planned on each of the kinds. Started again, it goes on with the same runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.records import CommitInfo, DeviceInfo, RunInfo
from flexq_bench.fleet import RayPool, RayWorkers, Times, Work
from flexq_bench.fleet.ray_workers import WorkerDescription
from flexq_bench.fleet.workers import Report
from flexq_bench.measure import Measured
from flexq_bench.repository.provenance import ROOT, source_hash
from flexq_bench.runs.lifecycle import OnRecord, open_run
from flexq_bench.runs.worker import Worker
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

COMMIT = CommitInfo("a" * 40, None, 1, dirty=False)
TIMES = Times(start=180, case=20, beat=1, lease=6, device=120, scan=1, database=120)
_SHAPES = 12  # that the cases of a kind are spread over


def simulated_gpu(seconds: float) -> type:
    """A class of workers that take so long for a case and find 20 us.

    A class of its own each time, so that Ray carries it to the nodes by value.
    """

    class SimulatedGpu:
        def __init__(self, backend: str, seed: int, tuning: str) -> None:
            import ray

            node = ray.get_runtime_context().get_node_id()
            resources = next(n["Resources"] for n in ray.nodes() if n["NodeID"] == node)
            kind = next(r for r in resources if r.startswith("accelerator_type:"))
            device = DeviceInfo(
                f"GPU-{node[:12]}-{ray.get_gpu_ids()[0]}",
                kind.removeprefix("accelerator_type:"),
                "cuda",
                compute_capability="8.6",
            )
            self._worker = Worker(device, {"host": f"node {node[:8]}"}, (8, 6), os.getpid())

        def describe(self) -> WorkerDescription:
            return WorkerDescription(self._worker, source_hash(ROOT), "simulated")

        def memory_obstacles(self, cases: tuple[Case, ...]) -> dict[str, str]:
            return {}

        def measure(self, case: Case, choices: tuple[object, ...]) -> Report:
            time.sleep(seconds)
            return Report(Measured("ok", "", 0, 1, "normal-v1", median_us=20.0, n_samples=50))

    return SimulatedGpu


def cases_of(count: int) -> list[Case]:
    return [
        Case("flexq-w6a6", GemmWorkload(1 + i // _SHAPES, 256 * (1 + i % _SHAPES), 256))
        for i in range(count)
    ]


def runs_of(kinds: Sequence[str], cases: Sequence[Case]) -> list[RunInfo]:
    return [
        RunInfo(
            f"00000000-0000-0000-0000-{number:012}",
            "simulated",
            "manual",
            "running",
            "2025-11-21T10:00:00+00:00",
            f"simulated {gpu}",
            tuple(case.key for case in cases),
        )
        for number, gpu in enumerate(kinds)
    ]


def measure(
    address: str,
    database: Database,
    kinds: Sequence[str],
    count: int,
    seconds: float,
    on_record: OnRecord,
) -> None:
    workers = RayWorkers(address, backend="cuda", seed=0, times=TIMES, actor=simulated_gpu(seconds))
    cases = cases_of(count)
    with RayPool(database, workers, COMMIT, TIMES).opened() as pool, ExitStack() as opened:
        runs = [opened.enter_context(open_run(database, r, COMMIT)) for r in runs_of(kinds, cases)]
        works = [Work(run, gpu, cases) for run, gpu in zip(runs, kinds, strict=True)]
        pool.measure(works, on_record)


if __name__ == "__main__":
    with open_database(sys.argv[2], busy_timeout_s=2.0) as opened:
        address, count, seconds = sys.argv[1], int(sys.argv[3]), float(sys.argv[4])
        measure(address, opened, sys.argv[5:], count, seconds, lambda record: None)
