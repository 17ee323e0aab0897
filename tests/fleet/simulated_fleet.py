"""A coordinator of simulated GPUs.

    python simulated_fleet.py ADDRESS DATABASE CASES SECONDS [NIGHT=CANARIES] KIND...

ADDRESS: of a Ray cluster whose nodes declare GPUs with an accelerator type. So many cases are
planned on each of the kinds; SECONDS: of a case, and of each canary, if it is a night. Started
again, it goes on with the same runs.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

from flexq_bench.ci.nightly import Rules, conclude_nights, measure_night
from flexq_bench.ci.report_data import KindReport
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.records import CommitInfo, DeviceInfo, RunInfo
from flexq_bench.fleet import RayPool, RayWorkers, Times, Work, ray_workers
from flexq_bench.fleet.compare_jobs import Compared, CompareJob
from flexq_bench.fleet.pool import OnCompared
from flexq_bench.fleet.ray_workers import WorkerDescription
from flexq_bench.fleet.workers import Report
from flexq_bench.measure import Measured
from flexq_bench.runs.lifecycle import OnRecord, open_run
from flexq_bench.runs.worker import Worker
from flexq_bench.verdicts import CaseComparison, Comparison, confirm
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.suite import Group, Shape, Suite

COMMIT = CommitInfo("a" * 40, None, 1, dirty=False)
TIMES = Times(start=180, case=20, beat=1, lease=6, device=120, scan=1, database=120)
NIGHT_TIMES = replace(TIMES, lease=15, device=20, compare=60)
_SHAPES = 12  # that the cases of a kind are spread over


def simulated_gpu(seconds: float) -> type:
    """A class of workers that take so long for a case and find 20 us.

    A class of its own each time, so that Ray carries it to the nodes by value.
    """

    class SimulatedGpu:
        def __init__(self, backend: str, seed: int, tuning: str) -> None:
            self._worker = describe()

        def describe(self) -> WorkerDescription:
            return WorkerDescription(self._worker, "simulated")

        def memory_obstacles(self, cases: tuple[Case, ...]) -> dict[str, str]:
            return {}

        def measure(self, case: Case, choices: tuple[object, ...]) -> Report:
            time.sleep(seconds)
            return Report(Measured("ok", "", 0, 1, "normal-v1", median_us=20.0, n_samples=50))

    describe = _describer()
    return SimulatedGpu


def simulated_comparer(seconds: float) -> type:
    """A class of workers that take so long to compare a case, each time with other numbers."""

    class SimulatedComparer:
        def __init__(self, backend: str, seed: int, tuning: str) -> None:
            self._worker = describe()

        def describe(self) -> WorkerDescription:
            return WorkerDescription(self._worker, "simulated")

        def beat(self) -> None:
            pass

        def compare(self, job: CompareJob, repository: Path, rules: object) -> Compared:
            time.sleep(seconds * len(job.cases))
            return Compared(tuple(self._comparison(case, job) for case in job.cases))

        def _comparison(self, case: Case, job: CompareJob) -> CaseComparison:
            draw = random.Random()
            times = [tuple(20 * draw.lognormvariate(0, 0.01) for _ in range(24)) for _ in range(2)]
            blocks = Comparison(*times, placement=tuple(i // 2 for i in range(24)))
            return CaseComparison(case, job.base, job.head, blocks, confirm(blocks))

    describe = _describer()
    return SimulatedComparer


def _describer() -> Callable[[], Worker]:
    """A function that describes the GPU of a Ray process; carried to the nodes by value."""

    def describe() -> Worker:
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
        return Worker(device, {"host": f"node {node[:8]}"}, (8, 6), os.getpid())

    return describe


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


def compare(
    address: str, database: Database, name: str, count: int, canaries: int, seconds: float
) -> list[KindReport]:
    """Carry out a night on all kinds of GPU, whose commits are in no repository."""
    ray_workers.shipped = lambda *given: None
    workers = RayWorkers(
        address,
        backend="cuda",
        seed=0,
        times=NIGHT_TIMES,
        actor=simulated_gpu(0.01),
        comparer=simulated_comparer(seconds),
    )
    shapes = tuple(Shape(256 * (1 + i), 256, "o_proj") for i in range(4))
    ms = tuple(range(1, 1 + count // len(shapes)))
    suite = Suite("simulated", "", "", (Group(("flexq-w6a6",), ms, shapes),))
    rules = Rules(name, Path(), canaries=canaries)
    with RayPool(database, workers, COMMIT, NIGHT_TIMES).opened() as pool:
        nights = measure_night(database, pool, suite, COMMIT, rules, progress=_unseen)
        return conclude_nights(database, pool, nights, COMMIT, rules, progress=_printed)


def _unseen(total: int) -> AbstractContextManager[OnRecord]:
    return nullcontext(lambda record: None)


def _printed(total: int) -> AbstractContextManager[OnCompared]:
    return nullcontext(lambda job: _say(f"job {job}"))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def carry_out(arguments: Sequence[str]) -> None:
    with open_database(arguments[1], busy_timeout_s=20.0) as opened:
        address, count, seconds = arguments[0], int(arguments[2]), float(arguments[3])
        name, is_night, canaries = arguments[4].partition("=")
        if is_night:
            for report in compare(address, opened, name, count, int(canaries), seconds):
                _say(f"{report.gpu} {report.outcome} {report.uncompared}")
        else:
            measure(address, opened, arguments[4:], count, seconds, lambda record: None)


if __name__ == "__main__":
    carry_out(sys.argv[1:])
