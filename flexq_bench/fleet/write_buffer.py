"""Buffer of the coordinator's writes, which survives outages of the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from flexq_bench.db.dialects import database_time, lock_for_writing
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.errors import UNAVAILABLE, DatabaseError
from flexq_bench.db.fleet import (
    Beat,
    ComparisonOutcome,
    WorkerInfo,
    abandon_jobs,
    beat,
    claim_jobs,
    end_worker,
    finish_comparisons,
    finish_jobs,
    register_worker,
    return_jobs,
)
from flexq_bench.db.records import Record
from flexq_bench.db.tuning import ChoiceInfo, add_choices
from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet.timeouts import Times
from flexq_bench.runs.transactions import retry_pause

_WARNING_INTERVAL_S = 20.0

Value = TypeVar("Value")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReturnedJob:
    """A job to be requeued. death: its worker died while measuring it."""

    job: int
    reason: str
    death: bool


@dataclass(slots=True)
class _Pending:
    joined: list[WorkerInfo] = field(default_factory=list)
    ended: list[tuple[str, str]] = field(default_factory=list)
    results: dict[int, Record] = field(default_factory=dict)
    quarantined: dict[int, Record] = field(default_factory=dict)
    compared: dict[int, ComparisonOutcome] = field(default_factory=dict)
    returned: list[ReturnedJob] = field(default_factory=list)
    abandoned: list[tuple[str, str]] = field(default_factory=list)
    choices: list[ChoiceInfo] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Flushed:
    """Results of one transaction.

    claimed: attempt number of each leased job. stored: record of each finished job that measured.
    deaths: number of worker deaths of each returned job. compared: finished jobs that compared.
    """

    claimed: Mapping[int, int]
    stored: Mapping[int, Record]
    deaths: Mapping[int, int]
    compared: frozenset[int] = frozenset()


class WriteBuffer:
    """Collects writes; a flush stores them and leases jobs in one transaction.

    During an outage of the database the writes stay in the buffer and no job is leased.
    """

    def __init__(
        self,
        database: Database,
        times: Times,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database, self._times, self._clock = database, times, clock
        self._pending = _Pending()
        self._away_since: float | None = None
        self._last_warning = 0.0
        self._next_attempt = 0.0

    def add_worker(self, info: WorkerInfo) -> None:
        self._pending.joined.append(info)

    def end_worker(self, worker: str, detail: str) -> None:
        """Mark a worker as ended. detail: why it was lost; empty: it stopped regularly."""
        self._pending.ended.append((worker, detail))

    def add_result(self, job: int, record: Record, *, quarantined: bool = False) -> None:
        """Finish a job. quarantined: the record holds the reason for quarantine."""
        (self._pending.quarantined if quarantined else self._pending.results)[job] = record

    def add_outcome(self, job: int, outcome: ComparisonOutcome) -> None:
        """Finish a job that compares."""
        self._pending.compared[job] = outcome

    def return_job(self, job: int, reason: str, *, death: bool) -> None:
        self._pending.returned.append(ReturnedJob(job, reason, death))

    def abandon_jobs(self, run: str, reason: str) -> None:
        """Mark the run's waiting jobs as without a device."""
        self._pending.abandoned.append((run, reason))

    def add_choices(self, choices: Sequence[ChoiceInfo]) -> None:
        self._pending.choices.extend(choices)

    def flush(
        self, claims: Mapping[int, str], beats: Sequence[Beat], *, own_workers: Collection[str] = ()
    ) -> Flushed | None:
        """Write what is pending, renew leases, lease jobs; None: the database is unavailable.

        claims: the worker's uuid by job. own_workers: as in `claim_jobs`. Raises
        InfrastructureError after too long an outage, DatabaseError for errors that are not an
        outage.
        """
        if not (self._pending or claims or beats):
            return Flushed({}, {}, {})
        if self._clock() < self._next_attempt:
            return None
        try:
            with self._database.session() as session:
                flushed = self._write(session, claims, beats, own_workers)
        except UNAVAILABLE as error:
            self._handle_outage(error)
            return None
        if self._away_since is not None:
            log.warning("the database is back after %.0f s", self._clock() - self._away_since)
        self._away_since, self._next_attempt = None, 0.0
        self._pending = _Pending()
        return flushed

    def read(self, query: Callable[[Session], Value]) -> Value | None:
        """Query the database; None: it is unavailable. Raises what `flush` raises."""
        try:
            with self._database.session() as session:
                return query(session)
        except UNAVAILABLE as error:
            self._handle_outage(error)
            return None

    @property
    def unwritten_jobs(self) -> set[int]:
        """Jobs whose result or return is not written yet."""
        pending = self._pending
        returned = {returned_job.job for returned_job in pending.returned}
        finished = (pending.results, pending.quarantined, pending.compared)
        return returned.union(*finished)

    @property
    def unwritten_records(self) -> tuple[Record, ...]:
        """Results that are not written yet."""
        return (*self._pending.results.values(), *self._pending.quarantined.values())

    @property
    def is_settled(self) -> bool:
        """True if nothing waits to be written."""
        return not self._pending

    def _write(
        self,
        session: Session,
        claims: Mapping[int, str],
        beats: Sequence[Beat],
        own_workers: Collection[str],
    ) -> Flushed:
        lock_for_writing(session.connection())  # first, as waiting for the lock takes time
        now = database_time(session)
        until = now + timedelta(seconds=self._times.lease)
        pending = self._pending
        for info in pending.joined:
            register_worker(session, info, at=now)
        stored: set[int] = set()
        for results, state in ((pending.results, "done"), (pending.quarantined, "quarantined")):
            if results:
                stored |= finish_jobs(session, results, state=state)
        compared = finish_comparisons(session, pending.compared) if pending.compared else set()
        deaths: dict[int, int] = {}
        for death in (False, True):
            reasons = {job.job: job.reason for job in pending.returned if job.death is death}
            if reasons:
                deaths |= return_jobs(session, reasons, death=death)
        for run, reason in pending.abandoned:
            abandon_jobs(session, run, reason)
        add_choices(session, pending.choices, at=now)
        beat(session, beats, until=until, at=now)
        for worker, detail in pending.ended:
            end_worker(session, worker, detail=detail, at=now)
        claimed = (
            claim_jobs(session, claims, until=until, at=now, own_workers=own_workers)
            if claims
            else {}
        )
        records = {**pending.results, **pending.quarantined}
        return Flushed(claimed, {job: records[job] for job in stored}, deaths, frozenset(compared))

    def _handle_outage(self, error: DatabaseError) -> None:
        now = self._clock()
        if self._away_since is None:
            self._away_since = self._last_warning = now
            log.warning("%s; results are kept in memory until then", error)
        elif now - self._last_warning >= _WARNING_INTERVAL_S:
            self._last_warning = now
            log.warning("the database is away for %.0f s: %s", now - self._away_since, error)
        if now - self._away_since > self._times.database:
            raise InfrastructureError(
                f"the database was away for {now - self._away_since:.0f} s ({error}): "
                "continue with --resume when it is available"
            ) from error
        self._next_attempt = now + retry_pause(now - self._away_since)
