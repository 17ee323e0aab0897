"""Coordinators of simulated workers, each in a process of its own, forked from one that is warm.

Reads JSON objects from stdin, a line each: {"start": {…Order…}} answers with a process id,
{"wait": pid} with its exit code. Coordinator, leases, buffer, run and database are the program's;
only the workers are simulated: they wait, answer, die or hang as a seed says.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from flexq_bench.ci.nightly import Rules, conclude_nights, measure_night
from flexq_bench.cli.failures import exit_code_of
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import CommitInfo, DeviceInfo, Record, RunInfo
from flexq_bench.db.tuning import ChoiceInfo
from flexq_bench.errors import one_line
from flexq_bench.exit_codes import INTERRUPTED, UNREAD
from flexq_bench.fleet import shipping
from flexq_bench.fleet.compare_jobs import Compared, CompareJob
from flexq_bench.fleet.pool import Work
from flexq_bench.fleet.ray_pool import RayPool
from flexq_bench.fleet.ray_workers import RayWorkers
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import Event, Finished, Joined, Lost, ReadyWorker, Report
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.measure import Measured
from flexq_bench.runs.lifecycle import open_run
from flexq_bench.runs.worker import Worker
from flexq_bench.verdicts import CaseComparison, Comparison, confirm
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.suite import Group, Shape, Suite
from tests.fleet import simulated_fleet
from tests.fleet.simulated_fleet import simulated_gpu

GPU = "simulated"
SHAPES = (Shape(256, 256, "o_proj"),)
COMMIT = CommitInfo("a" * 40, None, 1, dirty=False)
TIMES = Times(start=10, case=2, compare=3, beat=0.5, lease=2, device=20, scan=1, database=60)
OK = Measured("ok", "", 0, 1, "normal-v1", median_us=20.0, n_samples=50)


@dataclass(frozen=True, slots=True)
class Order:
    """database: its URL. log: the file of its lines, each with the seconds of the host's clock.

    deaths, hangs: share of measurements that end their worker, or never end. poison: every so
    many-th result holds what no database stores. canaries: compare so many cases, in a night named
    as the run; 0: only measure. busy_s: as busy_timeout_s of open_database; short, so that a lock
    of seconds is an outage. cluster: address of the Ray cluster whose actors simulate the workers;
    empty: this process. ray_version: that this process says it has. words: of simulated_fleet.py,
    which this process then runs instead. environment: more variables.
    """

    database: str
    log: str
    run: str
    cases: int
    workers: int = 2
    seconds: float = 0.02
    deaths: float = 0.0
    hangs: float = 0.0
    poison: int = 0
    canaries: int = 0
    seed: int = 0
    busy_s: float = 1.0
    cluster: str = ""
    ray_version: str = ""
    words: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class SimulatedWorkers:
    """Workers that take their time in this process."""

    def __init__(self, order: Order) -> None:
        self._order, self._chance = order, random.Random(f"{order.seed} {os.getpid()}")
        self._members: dict[str, ReadyWorker] = {}
        self._due: dict[str, float] = {}
        self._events: deque[Event] = deque()
        self._count = 0
        self._jobs: dict[str, CompareJob] = {}
        for index in range(order.workers):
            self._join(f"{GPU} {os.getpid()} {index}")

    backend, refusals, arriving, blocked = "cuda", (), 0, 0
    refused_gpus: ClassVar[Mapping[str, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def refusals_of(self, gpu: str) -> tuple[str, ...]:
        return ()

    def poll(self, timeout_s: float) -> Sequence[Event]:
        until = time.monotonic() + timeout_s
        while not self._events and time.monotonic() < until:
            now = time.monotonic()
            for uuid in [name for name, due in self._due.items() if due <= now]:
                del self._due[uuid]
                self._answer(uuid)
            if not self._events:
                select.select([], [], [], 0.002)  # faketime breaks time.sleep now and then
        events = list(self._events)
        self._events.clear()
        return events

    def start(self, worker: str, case: Case, choices: Sequence[ChoiceInfo]) -> None:
        hangs = self._chance.random() < self._order.hangs
        takes = self._order.seconds * self._chance.uniform(0.5, 1.5)
        self._due[worker] = float("inf") if hangs else time.monotonic() + takes

    def compare(self, worker: str, job: CompareJob, repository: Path, rules: object = None) -> None:
        self._jobs[worker] = job
        self.start(worker, job.cases[0], ())

    def use(self, kind: str, gpus: int = 1) -> None:
        for worker in list(self._members):
            self.end(worker, "")

    def end(self, worker: str, reason: str) -> None:
        self._due.pop(worker, None)
        self._lose(worker, reason)

    def give_back(self, worker: str) -> None:
        self.end(worker, "")

    def take_back(self, workers: Collection[str]) -> None:
        pass

    def memory_obstacles(self, worker: str, cases: Sequence[Case]) -> Mapping[str, str]:
        return {}

    def _answer(self, uuid: str) -> None:
        if self._chance.random() < self._order.deaths:
            self._lose(uuid, "killed by signal 9")
            return
        if uuid in self._jobs:
            job = self._jobs.pop(uuid)
            compared = tuple(self._comparison(case, job) for case in job.cases)
            self._events.append(Finished(uuid, Compared(compared)))
            return
        self._count += 1
        poisoned = self._order.poison and self._count % self._order.poison == 0
        bad = Measured("failed", "a\0b", 0, 1, "normal-v1")
        self._events.append(Finished(uuid, Report(bad if poisoned else OK)))

    def _comparison(self, case: Case, job: CompareJob) -> CaseComparison:
        """Numbers that no other comparison has, so that a second one of the job would show."""
        times = [
            tuple(20 * self._chance.lognormvariate(0, 0.01) for _ in range(24)) for _ in range(2)
        ]
        blocks = Comparison(*times, placement=tuple(i // 2 for i in range(24)))
        return CaseComparison(case, job.base, job.head, blocks, confirm(blocks))

    def _join(self, device: str) -> None:
        uuid = f"{random.randrange(2**63):016x}"
        worker = Worker(DeviceInfo(device, GPU, "cuda"), {"host": "here"}, (9, 0), os.getpid())
        self._members[uuid] = ReadyWorker(uuid, worker, "software")
        self._events.append(Joined(self._members[uuid]))

    def _lose(self, uuid: str, reason: str) -> None:
        member = self._members.pop(uuid)
        self._jobs.pop(uuid, None)
        self._events.append(Lost(uuid, reason))
        self._join(member.device)


def cases_of(count: int) -> list[Case]:
    return [Case("flexq-w6a6", GemmWorkload(1 + i, 256, 256)) for i in range(count)]


def measure(order: Order) -> None:
    cases = cases_of(order.cases)
    keys = tuple(case.key for case in cases)
    began = "2025-11-21T10:00:00+00:00"
    run = RunInfo(order.run, "made", "manual", "running", began, order.run, keys)

    def on_record(record: Record) -> None:
        logging.getLogger("faults").info("%s %s", record.case, record.status)

    if order.ray_version:
        import ray

        ray.__version__ = order.ray_version
    with (
        open_database(order.database, busy_timeout_s=order.busy_s, silence_s=1.5) as database,
        RayPool(database, workers_of(order), COMMIT, TIMES).opened() as pool,
        open_run(database, run, COMMIT) as opened,
    ):
        pool.measure([Work(opened, GPU, cases)], on_record)


def workers_of(order: Order) -> Any:
    if not order.cluster:
        return SimulatedWorkers(order)
    times = replace(TIMES, start=240, device=240)  # actors import torch
    actor = simulated_gpu(order.seconds)
    return RayWorkers(order.cluster, backend="cuda", seed=0, times=times, actor=actor)


def compare(order: Order) -> None:
    """A night: measure, compare its canaries, judge."""
    suite = Suite(
        order.run, "", "", (Group(("flexq-w6a6",), tuple(range(1, order.cases)), SHAPES),)
    )
    rules = Rules(order.run, Path(), canaries=order.canaries)
    logger = logging.getLogger("faults")
    with (
        open_database(order.database, busy_timeout_s=order.busy_s, silence_s=1.5) as database,
        ended_by_terminate(),
        RayPool(database, workers_of(order), COMMIT, TIMES).opened() as pool,
    ):
        nights = measure_night(
            database, pool, suite, COMMIT, rules,
            progress=lambda _: nullcontext(lambda record: None),
        )  # fmt: skip
        [report] = conclude_nights(
            database, pool, nights, COMMIT, rules,
            progress=lambda _: nullcontext(lambda job: logger.info("job %s ok", job)),
        )  # fmt: skip
    logger.info("the night is %s: %s", report.outcome, report.uncompared)


def serve(order: Order) -> int:
    """Carry out an order in this process; the exit code that the program would have."""
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Stamped())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logger = logging.getLogger("faults")
    logger.info("begins")
    os.environ.update(order.environment)
    try:
        if order.words:
            simulated_fleet._say = logger.info
            simulated_fleet.carry_out(order.words)
        else:
            (compare if order.canaries else measure)(order)
    except KeyboardInterrupt:
        logger.info("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return UNREAD
    except Exception as error:
        code = exit_code_of(error)
        logger.info("%s%s", "" if code is not None else f"unexpected {type(error).__name__}: ",
                    one_line(error))  # fmt: skip
        return 5 if code is None else int(code)
    logger.info("done")
    return 0


def load_ray() -> None:
    """Do once what every coordinator on Ray does, before it is forked."""
    import ray  # noqa: F401

    shipping._packed_program()


class _Stamped(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{time.monotonic():.3f} {record.getMessage()}"


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "start" in message:
            order = Order(**message["start"])
            if order.words or order.cluster:
                load_ray()
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os._exit(serve(order))
            answer = pid
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(message["wait"], 0)[1])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
