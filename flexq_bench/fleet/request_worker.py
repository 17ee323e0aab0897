"""Serving requests: one after the other becomes a run, measured on the pool that is given, or a
bisection by comparisons on it."""

from __future__ import annotations

import logging
import math
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

from db import queries
from db.clock import database_time
from db.engine import Database, Session
from db.errors import AWAY, DatabaseError
from db.locking import lock_for_writing
from db.records import CommitInfo, Record
from db.requests import (
    ClaimedRequest,
    claim_request,
    finish_request,
    renew_request,
    return_requests,
    set_request_detail,
    set_request_run,
)
from flexq_bench.errors import CancelledError, InfrastructureError, MeasureError, UsageError
from flexq_bench.fleet.pool import Kind, Pool, Work
from flexq_bench.fleet.requests import (
    BISECT,
    MAX_COMPARISONS,
    Bisection,
    bisection_of,
    request_plan,
)
from flexq_bench.fleet.retry_policy import (
    MEASURING_REFUSALS,
    PLANNING_REFUSALS,
    REVISION_REFUSALS,
    is_quarantined,
    quarantine_detail,
)
from flexq_bench.measure.ab import CaseComparison
from flexq_bench.measure.ab.revisions import commits_between, resolve_pair
from flexq_bench.repository.provenance import ROOT
from flexq_bench.repository.worktrees import is_published, repository_of
from flexq_bench.runs.lifecycle import OnRecord, OpenRun, new_run, open_run
from flexq_bench.runs.outage import through_outages
from workloads.case import Case

# A server says by beats that it is alive, as long as a case, or a comparison with its builds, may
# take: then it is taken to hang, and its lease runs out.
LEASE = timedelta(minutes=2)
BEAT_S = 20.0
LONGEST_CASE_S = 600.0
LONGEST_COMPARISON_S = 3600.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A request that came to an end. run None: it was refused before one began."""

    request: str  # uuid
    state: str
    run: str | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """Input of a search by bisection.

    commits: after good, oldest first, up to bad. compare: measures a commit against good. device:
    the uuid of the device, or of one of several. on_step: called with one line for each comparison.
    """

    case: Case
    good: str
    commits: Sequence[str]
    device: str
    compare: Callable[[str], CaseComparison]
    on_step: Callable[[str], None]


# Gives a line that says which commit it was, or why none was found; `ci` has it.
Search = Callable[[Question], str]


def server_name() -> str:
    """Return the name of this server: host, process id and a random suffix, as ids are reused."""
    return f"{platform.node()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


def serve_next(
    database: Database,
    pool: Pool,
    kind: Kind,
    commit: CommitInfo,
    server: str,
    *,
    on_record: OnRecord,
    search: Search,
) -> Served | None:
    """Measure the oldest request that fits this kind of device; None: there is none.

    What can't be measured as asked is a failed request, not an exception, and so is one over which
    MAX_DEATHS servers died in a row. A database that is away is waited for. Raises what the device
    raises, DatabaseError for what waiting doesn't mend, and KeyboardInterrupt; the next server then
    goes on with the request, at once or when its lease has run out.
    """
    request = _claim(database, kind, server)
    if request is None:
        return None
    log.info("request %s of %s", request.uuid[:8], request.requester)
    if request.kind == BISECT:
        return _bisect(database, pool, kind, request, server, search)
    try:
        plan = request_plan(request.kind, request.content, kind.backend, kind.capability)
    except PLANNING_REFUSALS as error:
        return _finish(database, request, "failed", request.run, str(error))
    # The run that the request has, where a server died, else a new one.
    planned = replace(
        new_run(plan.suite, "sweep", plan.keys), idempotency_key=f"request {request.uuid}"
    )
    uuid_of_run = request.run
    try:
        with open_run(database, planned, commit) as run:
            uuid_of_run = run.info.uuid
            cases = _still_missing(run, request, plan.cases)
            if is_quarantined(request.deaths):
                raise MeasureError(quarantine_detail(request.deaths))
            pool.check(cases)
            with _beating(database, request, server, LONGEST_CASE_S) as beats:
                renewing = _renewing(database, request, server, on_record, beats)
                pool.measure([Work(run, kind.gpu, cases)], renewing)
    except MEASURING_REFUSALS as error:
        return _finish(database, request, "failed", uuid_of_run, str(error))
    except CancelledError as error:
        return Served(request.uuid, "cancelled", uuid_of_run, str(error))
    except BaseException as error:
        _give_back(database, server, error)
        if isinstance(error, AWAY):
            return Served(request.uuid, "queued", uuid_of_run, str(error))
        raise
    return _finish(database, request, "done", uuid_of_run, "")


def _bisect(
    database: Database,
    pool: Pool,
    kind: Kind,
    request: ClaimedRequest,
    server: str,
    search: Search,
) -> Served:
    """Search in this clone for the commit that was asked for; its line is the request's detail."""

    def on_step(line: str) -> None:
        through_outages(
            database, lambda session: set_request_detail(session, request.uuid, server, line)
        )

    try:
        wanted = bisection_of(request.content)
        if is_quarantined(request.deaths):
            raise MeasureError(quarantine_detail(request.deaths))
        pool.check([wanted.case])
        repository = repository_of(ROOT)
        good, bad = (one.commit for one in resolve_pair(repository, wanted.good, wanted.bad))
        if not is_published(repository, bad):
            raise UsageError(
                f"{bad[:10]} is in no branch and no tag here: a request measures what was merged"
            )
        commits = commits_between(repository, good, bad)
        if not commits:
            raise UsageError(f"no commit after {good[:10]} up to {bad[:10]} changes the code")
        compare = _comparing(database, pool, kind, request, server, wanted, repository)
        device = pool.machine(kind.gpu).device.uuid
    except PLANNING_REFUSALS as error:
        return _finish(database, request, "failed", None, str(error))
    try:
        words = search(Question(wanted.case, good, commits, device, compare, on_step))
    except CancelledError as error:
        return Served(request.uuid, "cancelled", None, str(error))
    except REVISION_REFUSALS as error:
        return _finish(database, request, "failed", None, str(error))
    except BaseException as error:
        _give_back(database, server, error)
        raise
    return _finish(database, request, "done", None, words)


def _comparing(
    database: Database,
    pool: Pool,
    kind: Kind,
    request: ClaimedRequest,
    server: str,
    wanted: Bisection,
    repository: Path,
) -> Callable[[str], CaseComparison]:
    """Compare a commit with the good one, as often as a request may."""
    done = 0

    def compare(commit: str) -> CaseComparison:
        nonlocal done
        if done >= MAX_COMPARISONS:
            raise UsageError(f"{MAX_COMPARISONS} comparisons are done, a request has no more")
        # Before an answer, so that a comparison that ends its server counts as its death.
        _renew(database, request, server, has_result=done > 0)
        done += 1
        with _beating(database, request, server, LONGEST_COMPARISON_S):
            (compared,) = pool.compare(kind.gpu, repository, wanted.good, commit, [wanted.case])
        return compared

    return compare


def _still_missing(run: OpenRun, request: ClaimedRequest, cases: Sequence[Case]) -> list[Case]:
    """The cases that the run lacks; the request is told which run it became."""

    def missing_of(session: Session) -> set[str]:
        set_request_run(session, request.uuid, run.info.uuid)
        return set(queries.missing_cases(session, run.info.uuid))

    missing = through_outages(run.database, missing_of)
    return [case for case in cases if case.key in missing]


class _Beats:
    """Renews the lease of a request, until so many seconds have passed without progress."""

    def __init__(
        self, database: Database, request: ClaimedRequest, server: str, longest_s: float
    ) -> None:
        self._database, self._request, self._server = database, request, server
        self._longest_s = longest_s
        self.is_over = Event()
        self.progress()

    def progress(self) -> None:
        """Something is done: what comes now may take as long again."""
        self._end = time.monotonic() + self._longest_s

    def beat(self) -> None:
        """Renew until the end, or until the request is another's: the next renewal tells that."""
        while not self.is_over.wait(BEAT_S) and time.monotonic() < self._end:
            try:
                with self._database.session() as session:
                    if not _renewed(session, self._request, self._server):
                        return
            except AWAY:
                continue
            except DatabaseError as error:
                log.warning("request %s: no beat was stored: %s", self._request.uuid[:8], error)


@contextmanager
def _beating(
    database: Database, request: ClaimedRequest, server: str, longest_s: float
) -> Iterator[_Beats]:
    """Renew the lease of a request while the block works."""
    beats = _Beats(database, request, server, longest_s)
    thread = Thread(target=beats.beat, name="request beats", daemon=True)
    thread.start()
    try:
        yield beats
    finally:
        beats.is_over.set()
        thread.join()


def _renewing(
    database: Database,
    request: ClaimedRequest,
    server: str,
    on_record: OnRecord,
    beats: _Beats,
) -> OnRecord:
    def renew(record: Record) -> None:
        beats.progress()
        _renew(database, request, server)
        on_record(record)

    return renew


def _renew(
    database: Database, request: ClaimedRequest, server: str, *, has_result: bool = True
) -> None:
    """Say that this server is at it. Raises CancelledError if the request was taken back."""
    if not through_outages(
        database, lambda session: _renewed(session, request, server, has_result=has_result)
    ):
        raise CancelledError(f"request {request.uuid[:8]} was taken back")


def _renewed(
    session: Session, request: ClaimedRequest, server: str, *, has_result: bool = False
) -> bool:
    lock_for_writing(session.connection())  # the time after waiting for it counts
    until = database_time(session) + LEASE
    return renew_request(session, request.uuid, server, until=until, has_result=has_result)


def _claim(database: Database, kind: Kind, server: str) -> ClaimedRequest | None:
    """The oldest request that fits this kind of device, leased to this server; None: none."""
    while True:
        try:
            with database.session() as session:
                lock_for_writing(session.connection())  # the time after waiting for it counts
                now = database_time(session)
                return claim_request(session, server, (kind.gpu,), until=now + LEASE, at=now)
        except AWAY as error:
            log.warning("%s; requests are served when it is back", error)
        # What an acknowledgement that was lost has leased to this server goes back, and whoever
        # else serves a request renews its lease first: the outage is nobody's death.
        _return_all(database, server)
        _wait_for_others()


def _wait_for_others() -> None:
    time.sleep(2 * BEAT_S)


def _give_back(database: Database, server: str, error: BaseException) -> None:
    """Leave the request to the next server after an error that is not of its work.

    Who was stopped does not wait for a database that is away; who failed does, as a request that
    is not given back counts as a death.
    """
    if isinstance(error, KeyboardInterrupt):
        with suppress(DatabaseError), database.session() as session:
            return_requests(session, server)
    elif isinstance(error, (InfrastructureError, *AWAY)):
        with suppress(DatabaseError):
            _return_all(database, server)


def _return_all(database: Database, server: str) -> None:
    """Give back what this server holds, as soon as the database takes it."""
    through_outages(database, lambda session: return_requests(session, server), longest_s=math.inf)


def _finish(
    database: Database, request: ClaimedRequest, state: str, run: str | None, detail: str
) -> Served:
    through_outages(
        database,
        lambda session: finish_request(
            session, request.uuid, state, detail=detail, at=database_time(session)
        ),
    )
    return Served(request.uuid, state, run, detail)
