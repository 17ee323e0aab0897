"""Driving jobs to their end: hand out, store, renew, replace. The database is the truth.

It keeps nothing that the database does not have but who measures what at this moment: killed at
any time, another one goes on with the jobs that are not done.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

from db import queries
from db.engine import Database
from db.errors import DatabaseError
from db.fleet import OPEN_JOB_STATES, Beat, WorkerInfo
from db.records import CommitInfo, Record, RunInfo
from db.tuning import ChoiceInfo, choices_of
from flexq_bench.errors import FlexqError, InfrastructureError
from flexq_bench.fleet.backlog import Backlog, Job, Shape
from flexq_bench.fleet.pool import Crew, Event, Finished, Joined, Lost, Member
from flexq_bench.fleet.retry_policy import MAX_DEATHS, is_quarantined, quarantine_detail
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.write_buffer import Ledger
from flexq_bench.measure import Measured
from flexq_bench.runs.executor import failed
from flexq_bench.runs.lifecycle import OnRecord, OpenRun
from flexq_bench.runs.record import build_record
from kernels.contract import Backend
from workloads.case import Case

_TURN_S = 0.5  # at most between two turns: what is due by the clock is not later than this
_LOOK_S = 1.0  # between two looks at jobs that another coordinator holds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A run whose jobs are stored, for one kind of GPU. cases: by key."""

    run: OpenRun
    gpu: str  # SKU
    cases: Mapping[str, Case]


@dataclass(slots=True)
class _Place:
    """A member and what it does.

    is_stale: what it measures is not wanted any more. told: choices of its kind that it knows.
    """

    member: Member
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
    """Measures works with a crew.

    commit: of the code that the crew runs. on_record: told of each result after it is stored;
    what it raises ends the work. clock: seconds, monotonic.
    """

    def __init__(
        self,
        database: Database,
        crew: Crew,
        commit: CommitInfo,
        times: Times,
        *,
        on_record: OnRecord,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._crew, self._commit = crew, commit
        self._times, self._on_record, self._clock = times, on_record, clock
        self._ledger = Ledger(database, times, clock=clock)
        self._places: dict[str, _Place] = {}
        self._works: dict[str, Work] = {}
        self._runs: dict[str, RunInfo] = {}
        self._kinds: dict[str, _Kind] = {}
        self._choices: dict[tuple[str, str], list[ChoiceInfo]] = {}
        self._returning: dict[int, tuple[Job, Member]] = {}
        self._elsewhere = False  # another coordinator holds leases on jobs of these works
        self._next_beat = self._next_look = 0.0

    @property
    def members(self) -> tuple[Member, ...]:
        """The workers that are ready."""
        return tuple(place.member for place in self._places.values())

    def gather(self) -> None:
        """Wait until every worker that is being started is ready or refused."""
        while True:
            self._handle_all(self._crew.poll(_TURN_S))
            self._ledger.turn({}, self._due_beats())
            if not self._crew.arriving and self._ledger.is_settled:
                return

    def carry_out(self, works: Sequence[Work]) -> None:
        """Until no job of these runs is open: each has a result, or a named reason for none.

        Raises InfrastructureError if the database stays away, and what on_record raises; what is
        being measured then is lost, and its jobs are free when their leases run out.
        """
        self._works = {work.run.info.uuid: work for work in works}
        # Without the plan: a record of 100,000 would carry it 100,000 times.
        self._runs = {uuid: replace(work.run.info, plan=()) for uuid, work in self._works.items()}
        self._kinds = {work.gpu: _Kind() for work in works}
        try:
            self._look()
            self._turn()  # before the first wait: those who are ready begin at once
            while not self._is_over():
                self._handle_all(self._crew.poll(_TURN_S))
                self._end_overdue()
                self._give_up_on_missing_kinds()
                self._turn()
                if self._must_look:
                    self._look()
        except BaseException:
            self._abort()
            raise

    def unfit(self, gpu: str, cases: Sequence[Case]) -> Mapping[str, str]:
        """By key, why cases can't be measured on this kind of GPU; none is there: nothing known.

        A worker that is lost meanwhile is replaced, and another one asked.
        Raises InfrastructureError if three were lost over it.
        """
        for deaths in range(1, MAX_DEATHS + 1):
            self._handle_all(self._crew.poll(0.0))  # who went meanwhile can't be asked
            here = (uuid for uuid, place in self._places.items() if place.member.gpu == gpu)
            member = next(here, None)
            if member is None:
                break
            try:
                return self._crew.unfit(member, cases)
            except InfrastructureError:
                if deaths == MAX_DEATHS:
                    raise
                self.gather()
        return {}

    def dismiss(self) -> None:
        """Say of every worker that it stopped as it should."""
        self._ledger.turn({}, self._beats())
        for uuid in self._places:
            self._ledger.ended(uuid, "")
        self._places.clear()
        self._ledger.turn({}, ())

    def _handle_all(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Joined):
                self._welcome(event.member)
            elif isinstance(event, Finished):
                self._take_result(event)
            else:
                self._let_go(event)

    def _welcome(self, member: Member) -> None:
        worker = member.worker
        self._places[member.uuid] = _Place(member)
        host = worker.environment.get("host", "")
        self._ledger.joined(
            WorkerInfo(member.uuid, host, worker.pid, worker.device, worker.environment)
        )
        log.info("%s on %s joined", member.gpu, host, extra={"worker": member.uuid})

    def _take_result(self, event: Finished) -> None:
        place = self._places[event.member]
        self._learn(place.member, event.report.choices)
        if place.job is None:
            place.is_stale = False
            return
        job, place.job = place.job, None
        place.finished += 1
        place.measuring_s += self._clock() - place.since
        place.temperature_c = event.report.measured.temperature_c
        self._ledger.result(job.id, self._record(job, place.member, event.report.measured))

    def _record(self, job: Job, member: Member, measured: Measured) -> Record:
        return build_record(
            job.case,
            measured,
            self._runs[job.run],
            self._commit,
            member.worker.device,
            member.worker.environment,
            job.attempt,
            repetition=job.repetition,
        )

    def _learn(self, member: Member, choices: Sequence[ChoiceInfo]) -> None:
        if choices:
            self._known(member).extend(choices)
            self._ledger.learnt(choices)

    def _known(self, member: Member) -> list[ChoiceInfo]:
        """The choices that hold for this worker, its kind's and its software's; read once."""
        key = (member.gpu, member.software)
        if key not in self._choices:
            stored = self._ledger.read(lambda session: choices_of(session, *key))
            if stored is None:
                return []
            self._choices[key] = stored
        return self._choices[key]

    def _let_go(self, event: Lost) -> None:
        place = self._places.pop(event.member)
        self._ledger.ended(event.member, event.reason)
        job = place.job
        log.warning(
            "a worker of %s is lost: %s",
            place.member.gpu,
            event.reason,
            extra={"worker": event.member, "job": job.id if job else None},
        )
        if job is not None:
            self._ledger.returned(job.id, event.reason, death=not event.blameless)
            self._returning[job.id] = job, place.member

    def _end_overdue(self) -> None:
        now = self._clock()
        for place in self._places.values():
            if place.job is None and not place.is_stale:
                continue
            # The first case of a process also compiles.
            limit = self._times.case + (0.0 if place.finished else self._times.start)
            if now - place.since > limit:
                place.since = now
                self._crew.end(place.member.uuid, f"no result after {limit:.0f} s: it hangs")

    def _give_up_on_missing_kinds(self) -> None:
        now = self._clock()
        present = {place.member.gpu for place in self._places.values()}
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
                        self._ledger.abandoned(work.run.info.uuid, reason)
                kind.backlog, kind.missing_since = Backlog(), None

    def _turn(self) -> None:
        picked = self._pick()
        claims = {job.id: place.member.uuid for place, job in picked}
        turn = self._ledger.turn(claims, self._due_beats())
        for place, job in picked:
            attempt = None if turn is None else turn.claimed.get(job.id)
            if attempt is not None:
                self._start(place, job.handed_out(attempt))
            elif turn is None:
                self._kinds[place.member.gpu].backlog.put_back(job)
            else:
                self._elsewhere = True
        if turn is None:
            return
        for record in turn.stored.values():
            self._on_record(record)
        for job_id, deaths in turn.deaths.items():
            self._take_back(*self._returning.pop(job_id), deaths)

    def _pick(self) -> list[tuple[_Place, Job]]:
        """An idle worker and its next job, for every idle worker that has one."""
        devices: dict[str, set[str]] = defaultdict(set)
        busy: dict[str, set[Shape]] = defaultdict(set)
        for place in self._places.values():
            devices[place.member.gpu].add(place.member.device)
            if place.job is not None:
                busy[place.member.gpu].add(place.job.shape)
        picked = []
        idle = [
            (place, self._kinds[place.member.gpu])
            for place in self._places.values()
            if place.is_idle and place.member.gpu in self._kinds
        ]
        # Who goes on with a shape comes before those who would take it over.
        idle.sort(key=lambda one: not one[1].backlog.has(one[0].last))
        for place, kind in idle:
            gpu = place.member.gpu
            job = kind.backlog.take(
                place.member.device, place.last, busy[gpu], devices=len(devices[gpu])
            )
            if job is not None:
                busy[gpu].add(job.shape)
                picked.append((place, job))
        return picked

    def _start(self, place: _Place, job: Job) -> None:
        known = self._known(place.member)
        news, place.told = known[place.told :], len(known)
        place.job, place.since, place.last = job, self._clock(), job.shape
        log.info(
            "%s, attempt %d, on %s",
            job.case.key,
            job.attempt,
            place.member.gpu,
            extra={"run": job.run, "job": job.id, "worker": place.member.uuid},
        )
        self._crew.start(place.member.uuid, job.case, news)

    def _take_back(self, job: Job, member: Member, deaths: int) -> None:
        if not is_quarantined(deaths):
            self._kinds[member.gpu].backlog.put_back(job)
            return
        detail = quarantine_detail(deaths)
        device = member.worker.device
        backend: Backend = "cuda" if device.backend == "cuda" else "cpu"
        measured = failed(job.case, detail, backend=backend, seed=0)
        log.warning("%s is %s", job.case.key, detail, extra={"run": job.run, "job": job.id})
        self._ledger.result(job.id, self._record(job, member, measured), quarantined=True)

    def _due_beats(self) -> list[Beat]:
        if self._clock() < self._next_beat:
            return []
        self._next_beat = self._clock() + self._times.beat
        return self._beats()

    def _beats(self) -> list[Beat]:
        return [
            Beat(
                uuid,
                place.job.case.key if place.job else None,
                place.temperature_c,
                place.finished,
                place.measuring_s,
            )
            for uuid, place in self._places.items()
        ]

    @property
    def _must_look(self) -> bool:
        return (
            self._elsewhere
            and self._clock() >= self._next_look
            and not any(kind.backlog for kind in self._kinds.values())
        )

    def _look(self) -> None:
        """Read which jobs are open: those that nobody holds become the backlog."""
        self._next_look = self._clock() + _LOOK_S
        ours = {place.job.id for place in self._places.values() if place.job}
        ours |= self._returning.keys() | self._ledger.unwritten_jobs
        now = datetime.now(UTC)
        waiting: dict[str, list[Job]] = {gpu: [] for gpu in self._kinds}
        self._elsewhere = False
        for uuid, work in self._works.items():
            rows = self._ledger.read(
                partial(queries.jobs_of, run_uuid=uuid, states=OPEN_JOB_STATES)
            )
            if rows is None:
                self._elsewhere = True  # there may be some: look again
                return
            for row in rows:
                if row.id in ours:
                    continue
                if row.lease_until is not None and row.lease_until >= now:
                    self._elsewhere = True
                    continue
                case, expected = work.cases[row.case_key], row.expected_s or 0.0
                waiting[work.gpu].append(Job(row.id, uuid, case, row.repetition, expected))
        for gpu, jobs in waiting.items():
            self._kinds[gpu].backlog = Backlog(jobs)

    def _is_over(self) -> bool:
        held = any(place.job for place in self._places.values())
        waiting = any(kind.backlog for kind in self._kinds.values())
        return not (
            held or waiting or self._returning or self._elsewhere or not self._ledger.is_settled
        )

    def _abort(self) -> None:
        """Free what is being measured, so that nobody must wait for its leases."""
        for place in self._places.values():
            if place.job is not None:
                self._ledger.returned(place.job.id, "the run was stopped", death=False)
                place.job, place.is_stale = None, True
        self._returning.clear()
        with suppress(DatabaseError, FlexqError):  # the reason for stopping matters more
            self._ledger.turn({}, ())
