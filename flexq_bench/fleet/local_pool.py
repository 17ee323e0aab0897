"""The pool of this process: cases are measured one after the other, on its device.

Comparisons use all of its GPUs at the same time. The process can be registered as a worker, so that
other processes see its heartbeats.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from flexq_bench.db import queries
from flexq_bench.db.dialects import database_time, lock_for_writing
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.fleet import (
    Beat,
    ComparisonOutcome,
    WorkerInfo,
    beat,
    claim_jobs,
    end_worker,
    finish_comparisons,
    register_worker,
    return_jobs,
)
from flexq_bench.db.leases import COMPARE, OPEN_JOB_STATES
from flexq_bench.db.records import DeviceInfo, Record, RunInfo
from flexq_bench.errors import UsageError, one_line
from flexq_bench.fleet.compare_jobs import Compared, CompareJob, ComparisonWork
from flexq_bench.fleet.pool import Kind, OnCompared, Work
from flexq_bench.fleet.retry_policy import comparison_quarantine, is_quarantined
from flexq_bench.fleet.timeouts import Times
from flexq_bench.measure.ab import InterleaveRules, compare_commits, compare_project
from flexq_bench.measure.ab.blocks import Block, OnBlock
from flexq_bench.measure.ab.experiment import Options
from flexq_bench.measure.device import device_info, device_infos
from flexq_bench.measure.device_lock import devices_alone
from flexq_bench.repository.project import Project, revision
from flexq_bench.runs.lifecycle import OnRecord, store_results
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.process_meter import Measurer
from flexq_bench.runs.transactions import run_transaction
from flexq_bench.runs.worker import MeasuredCase, Worker
from flexq_bench.verdicts import CaseComparison
from flexq_bench.workloads.case import Case

HEARTBEAT_INTERVAL = timedelta(seconds=20)
LEASE = timedelta(seconds=Times().lease)  # of a comparison; renewed by each heartbeat
_POLL_INTERVAL_S = 1.0  # while another process has leased the remaining comparisons

log = logging.getLogger(__name__)


class LocalPool:
    """A pool of this process. It holds as many devices, from its own on, as its cases need.

    device: its name in torch. project: the project whose commits are compared; None: this
    repository. others: names of further devices of its kind, which compare too.
    """

    def __init__(
        self,
        database: Database,
        measurer: Measurer,
        device: str,
        project: Project | None = None,
        others: Sequence[str] = (),
    ) -> None:
        self._database, self._measurer = database, measurer
        self._device, self._project, self._others = device, project, others
        self._worker = measurer.worker

    @property
    def worker(self) -> Worker:
        """This process."""
        return self._worker

    @property
    def kinds(self) -> Sequence[Kind]:
        worker, devices = self._worker, 1 + len(self._others)
        kind = Kind(worker.device.sku, self._measurer.backend, worker.capability, devices=devices)
        return (kind,)

    def refresh(self) -> None:
        """Do nothing: the device does not change."""

    def check(self, cases: Sequence[Case]) -> None:
        for case in cases:
            self._measurer.check(case)

    def measure(self, works: Sequence[Work], on_record: OnRecord) -> None:
        with devices_alone(self._uuids(works)):
            for work in works:
                cases = self._left_of(work)
                outcomes = (
                    MeasuredCase(case, self._measurer.measure(case), self._worker)
                    for case in self._measurer.in_order(cases)
                )
                store_results(work.run, cases, outcomes, on_record=on_record)

    def _left_of(self, work: Work) -> Sequence[Case]:
        """Cases that no other process of the run stored while it held the devices."""
        run = work.run
        left = run_transaction(
            run.database, lambda session: queries.cases_to_measure(session, run.info.uuid)
        )
        stored = set(run.info.plan).difference(left)
        return [case for case in work.cases if case.key not in stored]

    def _uuids(self, works: Sequence[Work]) -> list[str]:
        """Devices of the case that needs most, as far as this machine has them."""
        most = max((case.gpus for work in works for case in work.cases), default=1)
        return [info.uuid for info in device_infos(self._device, most)]

    def machine(self, gpu: str) -> Machine:
        project = "" if self._project is None else self._project.name
        return Machine(self._measurer.backend, device_info(self._device), project)

    def refusal(self, gpu: str) -> str:
        return ""

    @property
    def refused_gpus(self) -> Mapping[str, str]:
        return {}

    def compare(self, works: Sequence[ComparisonWork], on_compared: OnCompared) -> None:
        turn, ended, several = threading.Lock(), threading.Event(), threading.Event()

        def count(job: int) -> None:
            with turn:
                on_compared(job)

        def stop_if_ended(_case: Case, _block: Block) -> None:
            if ended.is_set():
                raise KeyboardInterrupt  # not an outcome of the comparison

        def needs_one(job: CompareJob) -> bool:
            if job.gpus > 1:
                several.set()
            return job.gpus == 1

        def compare_on(
            device: str, worker: Worker, takes: Callable[[CompareJob], bool] = needs_one
        ) -> None:
            compare = partial(self.compare_here, device=device, on_block=stop_if_ended)
            devices = 1 + len(self._others) if takes is needs_one else 1
            try:
                carry_out_comparisons(
                    *(self._database, worker, works, compare, count), devices=devices, takes=takes
                )
            except BaseException:
                ended.set()
                raise

        with ThreadPoolExecutor(max(1, len(self._others))) as threads:
            others = [
                threads.submit(compare_on, name, replace(self._worker, device=device_info(name)))
                for name in self._others
            ]
            try:
                compare_on(self._device, self._worker)
                for other in others:
                    other.result()
                if several.is_set():  # when no other comparison uses its devices
                    compare_on(self._device, self._worker, lambda job: job.gpus > 1)
            except BaseException:
                ended.set()  # also Ctrl-C while this waits
                for other in others:
                    if (error := other.exception()) and not isinstance(error, KeyboardInterrupt):
                        raise error from None  # the reason why this device's ended
                raise

    def compare_here(
        self,
        job: CompareJob,
        work: ComparisonWork,
        *,
        device: str | None = None,
        on_block: OnBlock | None = None,
    ) -> list[CaseComparison]:
        """Compare the commits of a job on a device; None: the first. Raises as compare_commits."""
        pair = (job.base, job.head)
        options: Options = {
            "device": device or self._device,
            "rules": work.rules or InterleaveRules(),
            "on_block": on_block,
        }
        if self._project is not None:
            first, second = (revision(self._project, sha) for sha in pair)
            return list(compare_project(self._project, first, second, job.cases, **options))
        return list(compare_commits(work.repository, *pair, job.cases, **options))

    def kind_to_resume(self, run: RunInfo, first: Record | None) -> Kind:
        (kind,) = self.kinds
        if first is not None and kind.backend != first.backend:
            raise UsageError(
                f"run {run.uuid[:8]} was begun on the {first.backend} backend: add "
                f"--backend {first.backend}, or start a new run"
            )
        return kind


def carry_out_comparisons(
    database: Database,
    worker: Worker,
    works: Sequence[ComparisonWork],
    compare: Callable[[CompareJob, ComparisonWork], Iterable[CaseComparison]],
    on_compared: OnCompared,
    *,
    devices: int = 1,
    takes: Callable[[CompareJob], bool] = lambda job: True,
) -> None:
    """Carry out the stored comparisons of runs on a worker's device, one after the other.

    devices: that do so; a job that fails here is left to the others first. takes: whether a job is
    for them. Jobs that another process has leased are waited for. Raises InfrastructureError if the
    database stays unavailable. An exception that ends the comparison returns its job.
    """
    work_of = {work.run: work for work in works}
    with registered_worker(database, worker) as presence:
        failed: set[int] = set()

        def is_ours(row: queries.JobRow) -> bool:
            return takes(CompareJob.from_data(row.content or {}))

        def is_left_to_others(row: queries.JobRow) -> bool:
            return row.id in failed and row.deaths < devices

        claim = partial(
            _claim,
            runs=tuple(work_of),
            worker=presence.name,
            is_ours=is_ours,
            is_left_to_others=is_left_to_others,
        )
        while (claimed := run_transaction(database, claim)) is not None:
            if not isinstance(claimed, _Claimed):
                time.sleep(_POLL_INTERVAL_S)
                continue
            presence.job, presence.task = claimed.id, claimed.job.name
            try:
                compared = Compared.by(partial(compare, claimed.job, work_of[claimed.run]))
            except BaseException:
                with suppress(DatabaseError), database.session() as session:
                    return_jobs(session, {claimed.id: "the run was stopped"}, death=False)
                raise
            end = partial(_end, job=claimed.id, compared=compared, device=worker.device)
            if run_transaction(database, end):
                on_compared(claimed.id)
            else:
                failed.add(claimed.id)
            presence.job = presence.task = None
            presence.finished += 1


@dataclass(frozen=True, slots=True)
class _Claimed:
    id: int
    run: str
    job: CompareJob


def _claim(
    session: Session,
    *,
    runs: Sequence[str],
    worker: str,
    is_ours: Callable[[queries.JobRow], bool],
    is_left_to_others: Callable[[queries.JobRow], bool],
) -> _Claimed | bool | None:
    """Lease a comparison of these runs; None: all have an outcome, True: the rest is for others."""
    lock_for_writing(session.connection())  # first, as waiting for the lock takes time
    now, is_open = database_time(session), None
    for run in runs:
        rows = queries.jobs_of(session, run, states=OPEN_JOB_STATES, kind=COMPARE)
        for row in sorted(filter(is_ours, rows), key=lambda row: row.deaths):
            is_open = True
            if is_left_to_others(row):
                continue
            claims = {row.id: worker}
            if claim_jobs(session, claims, until=now + LEASE, at=now, own_workers=(worker,)):
                assert row.content is not None  # it compares
                return _Claimed(row.id, run, CompareJob.from_data(row.content))
    return is_open


def _end(session: Session, *, job: int, compared: Compared, device: DeviceInfo) -> bool:
    """Store the end of a comparison, or queue it again; return True if it has an outcome."""
    outcome = compared.outcome(device)
    if outcome is None:
        assert compared.error is not None  # it has no outcome
        reason = one_line(compared.error)
        deaths = return_jobs(session, {job: reason}, death=True)[job]
        if not is_quarantined(deaths):
            return False
        outcome = ComparisonOutcome("quarantined", comparison_quarantine(deaths, reason))
    finish_comparisons(session, {job: outcome})
    return True


@dataclass(slots=True)
class Presence:
    """A registered worker. name: its uuid. job: whose lease is renewed; task: what it does."""

    name: str
    job: int | None = None
    task: str | None = None
    finished: int = 0


@contextmanager
def registered_worker(
    database: Database, worker: Worker, *, every: timedelta = HEARTBEAT_INTERVAL
) -> Iterator[Presence]:
    """Register a worker and send heartbeats during the block; mark it as stopped at the end.

    A heartbeat renews the lease on the job that the block sets.

    A heartbeat that could not be stored is not repeated: the next one follows. Raises
    DatabaseError if the worker can't be registered.
    """
    presence = Presence(str(uuid.uuid4()))
    name = presence.name
    info = WorkerInfo(name, platform.node(), worker.pid, worker.device, worker.environment)
    with database.session() as session:
        register_worker(session, info, at=database_time(session))
    ended = threading.Event()
    thread = threading.Thread(
        target=_send_heartbeats, args=(database, presence, every, ended), daemon=True
    )
    thread.start()
    try:
        yield presence
    finally:
        ended.set()
        thread.join()
        try:
            with database.session() as session:
                end_worker(session, name, at=database_time(session))
        except DatabaseError as error:  # must not hide the exception that ended the block
            log.warning("the worker's end was not stored: %s", error)


def _send_heartbeats(
    database: Database, presence: Presence, every: timedelta, ended: threading.Event
) -> None:
    while not ended.wait(every.total_seconds()):
        finished, task, job = presence.finished, presence.task, presence.job
        heartbeat = Beat(presence.name, task, None, finished, 0.0, job)
        try:
            with database.session() as session:
                now = database_time(session)
                beat(session, [heartbeat], until=now + LEASE, at=now)
        except DatabaseError as error:
            log.warning("no heartbeat was stored: %s", error)
