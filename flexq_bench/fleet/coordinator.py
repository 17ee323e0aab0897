"""Driving jobs to their end: hand out, store, renew, reassigned. The database is the truth.

It keeps nothing that the database does not have but who measures what at this moment: killed at
any time, another one goes on with the jobs that are not done.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from db import queries
from db.clock import database_time
from db.engine import Database
from db.errors import DatabaseError, FileMovedError
from db.fleet import OPEN_JOB_STATES, Beat, WorkerInfo
from db.records import CommitInfo, Record, RunInfo
from db.store import add_record
from db.tuning import ChoiceInfo, choices_of
from flexq_bench.errors import FlexqError, InfrastructureError
from flexq_bench.fleet.backlog import Backlog, Job, Shape
from flexq_bench.fleet.pool import Work
from flexq_bench.fleet.retry_policy import MAX_DEATHS, is_quarantined, quarantine_detail
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import Event, Finished, Joined, Lost, ReadyWorker, Workers
from flexq_bench.fleet.write_buffer import WriteBuffer
from flexq_bench.measure import Measured
from flexq_bench.runs.lifecycle import OnRecord
from flexq_bench.runs.record import build_record
from flexq_bench.runs.worker import failed
from kernels.contract import Backend
from workloads.case import Case

_STEP_S = 0.5  # at most between two exchanges: what is due by the clock is not later than this
_LOOK_S = 1.0  # between two looks at jobs that another coordinator holds
_LOOK_REST = 20  # further times what a look took

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Assigned:
    """A worker that is ready, and the job that it has.

    is_stale: its job is not wanted any more. told: how many choices of its kind it knows.
    """

    ready: ReadyWorker
    job: Job | None = None
    since: float = 0.0
    last: Shape | None = None
    is_stale: bool = False
    told: int = 0
    finished: int = 0
    measuring_s: float = 0.0
    temperature_c: float | None = None

    @property
    def is_idle(self) -> bool:
        return self.job is None and not self.is_stale


@dataclass(slots=True)
class _Kind:
    """All that waits for one SKU, and since when nobody of it has been there."""

    backlog: Backlog = field(default_factory=Backlog)
    missing_since: float | None = None


class Coordinator:
    """Measures works with workers.

    commit: of the code that the workers run. on_record: called with each result after it is stored;
    what it raises ends the work. clock: seconds, monotonic.
    """

    def __init__(
        self,
        database: Database,
        workers: Workers,
        commit: CommitInfo,
        times: Times,
        *,
        on_record: OnRecord,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._commit = workers, commit
        self._times, self._on_record, self._clock = times, on_record, clock
        self._buffer = WriteBuffer(database, times, clock=clock)
        self._assigned: dict[str, _Assigned] = {}
        self._works: dict[str, Work] = {}
        self._cases: dict[str, dict[str, Case]] = {}
        self._runs: dict[str, RunInfo] = {}
        self._kinds: dict[str, _Kind] = {}
        self._choices: dict[tuple[str, str], list[ChoiceInfo]] = {}
        self._returning: dict[int, tuple[Job, ReadyWorker]] = {}
        self._elsewhere = False  # another coordinator holds leases on jobs of these works
        self._is_outdated = False  # a job of the backlog was another coordinator's, or done
        self._next_beat = self._next_look = 0.0

    @property
    def workers(self) -> tuple[ReadyWorker, ...]:
        """The workers that are ready."""
        return tuple(assigned.ready for assigned in self._assigned.values())

    def gather(self) -> None:
        """Wait until every worker that is being started is ready or refused."""
        while True:
            self._handle_all(self._workers.poll(_STEP_S))
            self._buffer.flush({}, self._due_beats())
            if not self._workers.arriving and self._buffer.is_settled:
                return

    def carry_out(self, works: Sequence[Work]) -> None:
        """Until no job of these runs is open: each has a result, or a named reason for none.

        Raises InfrastructureError if the database stays away, and what on_record raises; what is
        being measured then is lost, and its jobs are free when their leases run out.
        """
        self._works = {work.run.info.uuid: work for work in works}
        self._cases = {
            uuid: {case.key: case for case in work.cases} for uuid, work in self._works.items()
        }
        # Without the plan: a record of 100,000 would carry it 100,000 times.
        self._runs = {uuid: replace(work.run.info, plan=()) for uuid, work in self._works.items()}
        self._kinds = {work.gpu: _Kind() for work in works}
        try:
            self._look()
            self._exchange()  # before the first wait: those who are ready begin at once
            while not self._is_over():
                self._handle_all(self._workers.poll(_STEP_S))
                self._end_overdue()
                self._give_up_on_missing_kinds()
                self._exchange()
                if self._must_look:
                    self._look()
        except BaseException:
            self._abort()
            raise

    def memory_obstacles(self, gpu: str, cases: Sequence[Case]) -> Mapping[str, str]:
        """By key, why cases can't be measured on this kind of GPU; none is there: nothing known.

        A worker that is lost meanwhile is replaced, and another one asked.
        Raises InfrastructureError if three were lost over it.
        """
        for deaths in range(1, MAX_DEATHS + 1):
            self._handle_all(self._workers.poll(0.0))  # who went meanwhile can't be asked
            here = (uuid for uuid, assigned in self._assigned.items() if assigned.ready.gpu == gpu)
            ready = next(here, None)
            if ready is None:
                break
            try:
                return self._workers.memory_obstacles(ready, cases)
            except InfrastructureError:
                if deaths == MAX_DEATHS:
                    raise
                self.gather()
        return {}

    def dismiss(self) -> None:
        """Say of every worker that it stopped as it should."""
        self._buffer.flush({}, self._beats())
        for uuid in self._assigned:
            self._buffer.ended(uuid, "")
        self._assigned.clear()
        self._buffer.flush({}, ())

    def _handle_all(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Joined):
                self._welcome(event.worker)
            elif isinstance(event, Finished):
                self._take_result(event)
            else:
                self._let_go(event)

    def _welcome(self, ready: ReadyWorker) -> None:
        worker = ready.worker
        self._assigned[ready.uuid] = _Assigned(ready)
        host = worker.environment.get("host", "")
        self._buffer.joined(
            WorkerInfo(ready.uuid, host, worker.pid, worker.device, worker.environment)
        )
        log.info("%s on %s joined", ready.gpu, host, extra={"worker": ready.uuid})

    def _take_result(self, event: Finished) -> None:
        assigned = self._assigned[event.worker]
        self._learn(assigned.ready, event.answer.choices)
        if assigned.job is None:
            assigned.is_stale = False
            return
        job, assigned.job = assigned.job, None
        assigned.finished += 1
        assigned.measuring_s += self._clock() - assigned.since
        assigned.temperature_c = event.answer.measured.temperature_c
        self._buffer.result(job.id, self._record(job, assigned.ready, event.answer.measured))

    def _record(self, job: Job, ready: ReadyWorker, measured: Measured) -> Record:
        return build_record(
            job.case,
            measured,
            self._runs[job.run],
            self._commit,
            ready.worker.device,
            ready.worker.environment,
            job.attempt,
            repetition=job.repetition,
        )

    def _learn(self, ready: ReadyWorker, choices: Sequence[ChoiceInfo]) -> None:
        if choices:
            self._known(ready).extend(choices)
            self._buffer.learnt(choices)

    def _known(self, ready: ReadyWorker) -> list[ChoiceInfo]:
        """The choices that hold for this worker, its kind's and its software's; read once."""
        key = (ready.gpu, ready.software)
        if key not in self._choices:
            stored = self._buffer.read(lambda session: choices_of(session, *key))
            if stored is None:
                return []
            self._choices[key] = stored
        return self._choices[key]

    def _let_go(self, event: Lost) -> None:
        assigned = self._assigned.pop(event.worker)
        self._buffer.ended(event.worker, event.reason)
        job = assigned.job
        log.warning(
            "a worker of %s is lost: %s",
            assigned.ready.gpu,
            event.reason,
            extra={"worker": event.worker, "job": job.id if job else None},
        )
        if job is not None:
            self._buffer.returned(job.id, event.reason, death=not event.blameless)
            self._returning[job.id] = job, assigned.ready

    def _end_overdue(self) -> None:
        now = self._clock()
        for assigned in self._assigned.values():
            if assigned.job is None and not assigned.is_stale:
                continue
            # The first case of a process also compiles.
            limit = self._times.case + (0.0 if assigned.finished else self._times.start)
            if now - assigned.since > limit:
                assigned.since = now
                self._workers.end(assigned.ready.uuid, f"no result after {limit:.0f} s: it hangs")

    def _give_up_on_missing_kinds(self) -> None:
        now = self._clock()
        present = {assigned.ready.gpu for assigned in self._assigned.values()}
        for gpu, kind in self._kinds.items():
            if gpu in present or not kind.backlog:
                kind.missing_since = None
            elif kind.missing_since is None:
                kind.missing_since = now
                log.warning("no %s is there: %d jobs wait for one", gpu, len(kind.backlog))
            elif now - kind.missing_since > self._times.device:
                reason = f"no {gpu} came within {self._times.device:.0f} s"
                for work in self._works.values():
                    if work.gpu == gpu:
                        self._buffer.abandoned(work.run.info.uuid, reason)
                kind.backlog, kind.missing_since = Backlog(), None

    def _exchange(self) -> None:
        picked = self._pick()
        claims = {job.id: assigned.ready.uuid for assigned, job in picked}
        flushed = self._buffer.flush(claims, self._due_beats(), ours=self._assigned.keys())
        for assigned, job in picked:
            attempt = None if flushed is None else flushed.claimed.get(job.id)
            if attempt is not None:
                self._start(assigned, job.handed_out(attempt))
            elif flushed is None:
                self._kinds[assigned.ready.gpu].backlog.put_back(job)
            else:
                self._elsewhere = self._is_outdated = True
        if flushed is None:
            return
        for record in flushed.stored.values():
            self._on_record(record)
        for job_id, deaths in flushed.deaths.items():
            self._take_back(*self._returning.pop(job_id), deaths)

    def _pick(self) -> list[tuple[_Assigned, Job]]:
        """An idle worker and its next job, for every idle worker that has one."""
        devices: dict[str, set[str]] = defaultdict(set)
        busy: dict[str, set[Shape]] = defaultdict(set)
        for assigned in self._assigned.values():
            devices[assigned.ready.gpu].add(assigned.ready.device)
            if assigned.job is not None:
                busy[assigned.ready.gpu].add(assigned.job.shape)
        picked = []
        idle = [
            (assigned, self._kinds[assigned.ready.gpu])
            for assigned in self._assigned.values()
            if assigned.is_idle and assigned.ready.gpu in self._kinds
        ]
        # Who goes on with a shape comes before those who would take it over.
        idle.sort(key=lambda one: not one[1].backlog.has(one[0].last))
        for assigned, kind in idle:
            gpu = assigned.ready.gpu
            job = kind.backlog.take(
                assigned.ready.device, assigned.last, busy[gpu], devices=len(devices[gpu])
            )
            if job is not None:
                busy[gpu].add(job.shape)
                picked.append((assigned, job))
        return picked

    def _start(self, assigned: _Assigned, job: Job) -> None:
        known = self._known(assigned.ready)
        news, assigned.told = known[assigned.told :], len(known)
        assigned.job, assigned.since, assigned.last = job, self._clock(), job.shape
        log.info(
            "%s, attempt %d, on %s",
            job.case.key,
            job.attempt,
            assigned.ready.gpu,
            extra={"run": job.run, "job": job.id, "worker": assigned.ready.uuid},
        )
        self._workers.start(assigned.ready.uuid, job.case, news)

    def _take_back(self, job: Job, ready: ReadyWorker, deaths: int) -> None:
        if not is_quarantined(deaths):
            self._kinds[ready.gpu].backlog.put_back(job)
            return
        detail = quarantine_detail(deaths)
        device = ready.worker.device
        backend: Backend = "cuda" if device.backend == "cuda" else "cpu"
        measured = failed(job.case, detail, backend=backend, seed=0)
        log.warning("%s is %s", job.case.key, detail, extra={"run": job.run, "job": job.id})
        self._buffer.result(job.id, self._record(job, ready, measured), quarantined=True)

    def _due_beats(self) -> list[Beat]:
        if self._clock() < self._next_beat:
            return []
        self._next_beat = self._clock() + self._times.beat
        return self._beats()

    def _beats(self) -> list[Beat]:
        return [
            Beat(
                uuid,
                assigned.job.case.key if assigned.job else None,
                assigned.temperature_c,
                assigned.finished,
                assigned.measuring_s,
                assigned.job.id if assigned.job else None,
            )
            for uuid, assigned in self._assigned.items()
        ]

    @property
    def _must_look(self) -> bool:
        return (
            self._elsewhere
            and self._clock() >= self._next_look
            # Else each job that another one has done meanwhile would cost an exchange.
            and (self._is_outdated or not any(kind.backlog for kind in self._kinds.values()))
        )

    def _look(self) -> None:
        """Read which jobs are open: those that nobody holds become the backlog."""
        began = self._clock()
        self._next_look = began + _LOOK_S
        ours = {assigned.job.id for assigned in self._assigned.values() if assigned.job}
        ours |= self._returning.keys() | self._buffer.unwritten_jobs
        now = self._buffer.read(database_time)
        waiting: dict[str, list[Job]] = {gpu: [] for gpu in self._kinds}
        self._elsewhere = self._is_outdated = False
        for uuid, work in self._works.items():
            rows = self._buffer.read(
                partial(queries.jobs_of, run_uuid=uuid, states=OPEN_JOB_STATES)
            )
            if rows is None or now is None:
                self._elsewhere = True  # there may be some: look again
                return
            for row in rows:
                if row.id in ours:
                    continue
                is_leased = row.lease_until is not None and row.lease_until >= now
                if is_leased and row.worker not in self._assigned:
                    self._elsewhere = True
                    continue
                case, expected = self._cases[uuid][row.case_key], row.expected_s or 0.0
                waiting[work.gpu].append(Job(row.id, uuid, case, row.repetition, expected))
        for gpu, jobs in waiting.items():
            self._kinds[gpu].backlog = Backlog(jobs)
        self._next_look += _LOOK_REST * (self._clock() - began)  # of 100,000 jobs it takes long

    def _is_over(self) -> bool:
        held = any(assigned.job for assigned in self._assigned.values())
        waiting = any(kind.backlog for kind in self._kinds.values())
        return not (
            held or waiting or self._returning or self._elsewhere or not self._buffer.is_settled
        )

    def _abort(self) -> None:
        """Free what is being measured, so that nobody must wait for its leases."""
        for assigned in self._assigned.values():
            if assigned.job is not None:
                self._buffer.returned(assigned.job.id, "the run was stopped", death=False)
                assigned.job, assigned.is_stale = None, True
        self._returning.clear()
        try:
            self._buffer.flush({}, ())
        except FileMovedError:  # the run's end writes them to a file
            for record in self._buffer.unwritten_records:
                run = self._works[record.run.uuid].run
                run.unwritten.append(partial(add_record, record=record))
        except (DatabaseError, FlexqError):
            pass  # the reason for stopping matters more
