"""A pool of one device, that of this process: cases are measured one after the other.

The process can be registered as a worker, so that other processes see its heartbeats.
"""

from __future__ import annotations

import logging
import platform
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from flexq_bench.db.dialects import database_time
from flexq_bench.db.engine import Database
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.fleet import Beat, WorkerInfo, beat, end_worker, register_worker
from flexq_bench.db.records import Record, RunInfo
from flexq_bench.errors import UsageError
from flexq_bench.fleet.pool import Kind, Work
from flexq_bench.measure.ab import InterleaveRules, Suffices, compare_commits, compare_project
from flexq_bench.measure.device import device_info
from flexq_bench.measure.device_lock import device_alone
from flexq_bench.repository.project import Project, revision
from flexq_bench.runs.lifecycle import OnRecord, store_results
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.process_meter import Measurer
from flexq_bench.runs.worker import MeasuredCase, Worker
from flexq_bench.verdicts import CaseComparison
from flexq_bench.workloads.case import Case

HEARTBEAT_INTERVAL = timedelta(seconds=20)

log = logging.getLogger(__name__)


class LocalPool:
    """A pool of this process.

    device: its name in torch. project: the project whose commits are compared; None: this
    repository.
    """

    def __init__(self, measurer: Measurer, device: str, project: Project | None = None) -> None:
        self._measurer, self._device, self._project = measurer, device, project
        self._worker = measurer.worker

    @property
    def worker(self) -> Worker:
        """This process."""
        return self._worker

    @property
    def kinds(self) -> Sequence[Kind]:
        return (Kind(self._worker.device.sku, self._measurer.backend, self._worker.capability),)

    def refresh(self) -> None:
        """Do nothing: the device does not change."""

    def check(self, cases: Sequence[Case]) -> None:
        for case in cases:
            self._measurer.check(case)

    def measure(self, works: Sequence[Work], on_record: OnRecord) -> None:
        with device_alone(self._worker.device.uuid):
            for work in works:
                outcomes = (
                    MeasuredCase(case, self._measurer.measure(case), self._worker)
                    for case in self._measurer.in_order(work.cases)
                )
                store_results(work.run, work.cases, outcomes, on_record=on_record)

    def machine(self, gpu: str) -> Machine:
        project = "" if self._project is None else self._project.name
        return Machine(self._measurer.backend, device_info(self._device), project)

    def compare(
        self,
        gpu: str,
        repository: Path,
        base: str,
        head: str,
        cases: Sequence[Case],
        *,
        suffices: Suffices | None = None,
    ) -> list[CaseComparison]:
        device, rules = self._device, InterleaveRules(suffices=suffices)
        if self._project is not None:
            first, second = (revision(self._project, sha) for sha in (base, head))
            compared = compare_project(
                self._project, first, second, cases, device=device, rules=rules
            )
            return list(compared)
        return list(compare_commits(repository, base, head, cases, device=device, rules=rules))

    def kind_to_resume(self, run: RunInfo, first: Record | None) -> Kind:
        (kind,) = self.kinds
        if first is not None and kind.backend != first.backend:
            raise UsageError(
                f"run {run.uuid[:8]} was begun on the {first.backend} backend: add "
                f"--backend {first.backend}, or start a new run"
            )
        return kind


@contextmanager
def registered_worker(
    database: Database, worker: Worker, *, every: timedelta = HEARTBEAT_INTERVAL
) -> Iterator[None]:
    """Register a worker and send heartbeats during the block; mark it as stopped at the end.

    A heartbeat that could not be stored is not repeated: the next one follows. Raises
    DatabaseError if the worker can't be registered.
    """
    name = str(uuid.uuid4())
    info = WorkerInfo(name, platform.node(), worker.pid, worker.device, worker.environment)
    with database.session() as session:
        register_worker(session, info, at=database_time(session))
    ended = threading.Event()
    thread = threading.Thread(
        target=_send_heartbeats, args=(database, name, every, ended), name="presence", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        try:
            with database.session() as session:
                end_worker(session, name, at=database_time(session))
        except DatabaseError as error:  # must not hide the exception that ended the block
            log.warning("the worker's end was not stored: %s", error)


def _send_heartbeats(
    database: Database, name: str, every: timedelta, ended: threading.Event
) -> None:
    heartbeat = Beat(name, None, None, 0, 0.0)
    while not ended.wait(every.total_seconds()):
        try:
            with database.session() as session:
                now = database_time(session)
                beat(session, [heartbeat], until=now + every, at=now)
        except DatabaseError as error:
            log.warning("no heartbeat was stored: %s", error)
