"""Workers without processes, a mixed Ray cluster of nodes that only declare their GPUs."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flexq_bench.db import queries
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.fleet import JobInfo, add_jobs
from flexq_bench.db.records import CommitInfo, DeviceInfo, RunInfo
from flexq_bench.db.store import begin_run
from flexq_bench.db.tuning import ChoiceInfo
from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet.compare_jobs import Compared, CompareJob
from flexq_bench.fleet.coordinator import Coordinator
from flexq_bench.fleet.pool import Work
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import Event, Finished, Joined, Lost, ReadyWorker, Report
from flexq_bench.measure import Measured
from flexq_bench.runs.lifecycle import OpenRun
from flexq_bench.runs.worker import Worker
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

sys.path.insert(0, str(Path(__file__).parent))  # its helper: separate_machines

COMMIT = CommitInfo("a" * 40, None, 1, dirty=False)
OK = Measured("ok", "", 0, 1, "normal-v1", median_us=20.0, n_samples=50)
TIMES = Times(start=1, case=5, beat=1, lease=2, device=3, scan=1, database=50)

_numbers = itertools.count()

Answer = Measured | Report | Lost | None


class Clock:
    """Seconds that pass when somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ScriptedWorkers:
    """Workers that answer by a script: a result, a loss, or None: never.

    kinds: number of GPUs by SKU, all of one host. gpus: of a worker. script: called with the worker
    and the case; compares: with a worker and a comparison. replaces: replace a lost worker at once.
    lost_in_memory_query: number of workers that die in memory_obstacles.
    """

    kinds: Mapping[str, int]
    script: Callable[[ReadyWorker, Case], Answer]
    clock: Clock
    replaces: bool = True
    gpus: int = 1
    arriving: int = 0
    blocked: int = 0
    backend = "cuda"
    refusals: tuple[str, ...] = ()
    lost_in_memory_query: int = 0
    compares: Callable[[ReadyWorker, CompareJob], Compared | Lost | None] | None = None
    started: list[tuple[str, Any]] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    sent_choices: list[tuple[str, tuple[ChoiceInfo, ...]]] = field(default_factory=list)
    ended: list[tuple[str, str]] = field(default_factory=list)
    given_back: dict[str, ReadyWorker] = field(default_factory=dict)
    _members: dict[str, ReadyWorker] = field(default_factory=dict)
    _events: deque[Event] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._join_all()

    def _join_all(self) -> None:
        for gpu, count in self.kinds.items():
            for first in range(0, count - self.gpus + 1, self.gpus):
                self._join(*(f"{gpu} {first + index}" for index in range(self.gpus)), gpu=gpu)

    def _join(self, device: str, *further: str, gpu: str) -> None:
        number = next(_numbers)
        worker = Worker(DeviceInfo(device, gpu, "cuda"), {"host": "here"}, (9, 0), number)
        member = ReadyWorker(f"w{number}", worker, "software", further)
        self._members[member.uuid] = member
        self._events.append(Joined(member))

    def poll(self, timeout_s: float) -> Sequence[Event]:
        if not self._events:
            self.clock.now += timeout_s
        events = list(self._events)
        self._events.clear()
        return events

    def start(self, member: str, case: Case, choices: Sequence[ChoiceInfo]) -> None:
        self.started.append((member, case))
        self.sent_choices.append((member, tuple(choices)))
        answer = self.script(self._members[member], case)
        if isinstance(answer, Measured):
            answer = Report(answer)
        if isinstance(answer, Report):
            self._events.append(Finished(member, answer))
        elif isinstance(answer, Lost):
            self._lose(member, answer.reason, answer.blameless)

    def use(self, kind: str, gpus: int = 1) -> None:
        self.used.append(kind if gpus == 1 else f"{kind} {gpus}")
        self.gpus = gpus
        for member in list(self._members):
            self._lose(member, "", True, replaces=False)
        self._join_all()

    def compare(self, member: str, job: CompareJob, repository: Path, rules: Any = None) -> None:
        assert self.compares is not None
        self.started.append((member, job))
        answer = self.compares(self._members[member], job)
        if isinstance(answer, Compared):
            self._events.append(Finished(member, answer))
        elif isinstance(answer, Lost):
            self._lose(member, answer.reason, answer.blameless)

    def end(self, member: str, reason: str) -> None:
        self.ended.append((member, reason))
        self._lose(member, reason, False)

    def _lose(
        self, uuid: str, reason: str, blameless: bool, *, replaces: bool | None = None
    ) -> None:
        member = self._members.pop(uuid)
        self._events.append(Lost(uuid, reason, blameless))
        if self.replaces if replaces is None else replaces:
            self._join(member.device, *member.further_devices, gpu=member.gpu)

    def give_back(self, member: str) -> None:
        self.given_back[member] = self._members[member]
        self._lose(member, "", True, replaces=False)

    def take_back(self, workers: Collection[str]) -> None:
        for uuid in workers:
            member = self.given_back.pop(uuid)
            self._join(member.device, *member.further_devices, gpu=member.gpu)

    def memory_obstacles(self, member: str, cases: Sequence[Case]) -> Mapping[str, str]:
        if self.lost_in_memory_query:
            self.lost_in_memory_query -= 1
            self._lose(member, "killed", False)
            raise InfrastructureError("a worker did not answer: killed")
        return {case.key: "too large" for case in cases}


@dataclass
class Table:
    """Create works and coordinators, and read the stored state."""

    database: Database
    clock: Clock

    def work(
        self, gpu: str, cases: Sequence[Case], *, expected: Sequence[float] = (), repeat: int = 1
    ) -> Work:
        run = RunInfo(
            f"run of {gpu}",
            "made",
            "manual",
            "running",
            "2025-11-21T10:00:00+00:00",
            f"run of {gpu}",
            tuple(case.key for case in cases),
        )
        seconds = expected or [1.0] * len(cases)
        with self.database.session() as session:
            run = begin_run(session, run, COMMIT)
            jobs = [
                JobInfo(case.key, number, expected_s)
                for case, expected_s in zip(cases, seconds, strict=True)
                for number in range(1, repeat + 1)
            ]
            add_jobs(session, run.uuid, jobs)
        opened = OpenRun(self.database, run, COMMIT)
        return Work(opened, gpu, cases)

    def coordinator(self, crew: Any, on_record: Any = lambda record: None) -> Coordinator:
        return Coordinator(
            self.database, crew, COMMIT, TIMES, on_record=on_record, clock=self.clock
        )

    def states(self, work: Work) -> dict[str, str]:
        with self.database.session() as session:
            return {job.case_key: job.state for job in queries.jobs_of(session, work.run.info.uuid)}

    def received(self, work: Work) -> list[str]:
        with self.database.session() as session:
            return sorted(r.case for r in queries.run_records(session, work.run.info.uuid))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_database(str(tmp_path / "flexq.sqlite")) as database:
        yield database


@pytest.fixture
def table(database: Database, clock: Clock) -> Table:
    return Table(database, clock)


@pytest.fixture
def gpus(clock: Clock) -> Callable[..., ScriptedWorkers]:
    """gpus({"H200": 2}, script): two workers; script None: every case is fine."""

    def make(
        kinds: Mapping[str, int],
        script: Callable[[ReadyWorker, Case], Answer] | None = None,
        **changes: Any,
    ) -> ScriptedWorkers:
        return ScriptedWorkers(kinds, script or (lambda member, case: OK), clock, **changes)

    return make


@pytest.fixture
def a_case() -> Callable[..., Case]:
    def make(m: int = 1, n: int = 256, kernel: str = "flexq-w6a6") -> Case:
        return Case(kernel, GemmWorkload(m, n, 256))

    return make


@pytest.fixture(scope="session")
def simulated(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """simulated_fleet.py, loaded; `simulated.__file__` is what a process of its own runs."""
    return load_module(Path(__file__).with_name("simulated_fleet.py"))


@contextmanager
def ray_cluster(monkeypatch: pytest.MonkeyPatch, **head: Any) -> Iterator[Any]:
    """A cluster whose nodes have the GPUs that they declare, and none that this machine has."""
    from flexq_bench.fleet.ray_cluster import _LOOPBACK_ONLY, _QUIET

    for name, value in {**_QUIET, **_LOOPBACK_ONLY}.items():
        monkeypatch.setenv(name, value)
    from ray._private.accelerators import NvidiaGPUAcceleratorManager
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    detected = {"num_accelerators": 0, "accelerator_type": None}
    for name, value in detected.items():
        finds = staticmethod(lambda value=value: value)
        monkeypatch.setattr(NvidiaGPUAcceleratorManager, f"get_current_node_{name}", finds)

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "no_monitor": True,  # of an autoscaler: 3 CPU seconds
            "object_store_memory": 80 << 20,
            "node_ip_address": "127.0.0.1",
            **head,
        },
    )
    yield cluster
    cluster.shutdown()
    os.environ.pop("RAY_ADDRESS", None)


@pytest.fixture
def a_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster on this machine, without nodes that have GPUs."""
    with ray_cluster(monkeypatch) as cluster:
        yield cluster


@pytest.fixture
def a_cluster_for_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, int]]:
    """One that is reached from outside, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ray_cluster(monkeypatch, ray_client_server_port=port) as cluster:
        yield cluster, port


def add_gpus(cluster: Any, kind: str, count: int = 2) -> Any:
    """A node that declares so many GPUs of a kind."""
    return cluster.add_node(
        num_cpus=count,
        num_gpus=count,
        resources={f"accelerator_type:{kind}": count},
        object_store_memory=80 << 20,
        node_ip_address="127.0.0.1",
    )


@pytest.fixture
def add_node() -> Callable[..., Any]:
    return add_gpus
