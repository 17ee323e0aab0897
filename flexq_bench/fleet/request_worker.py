"""Serving of requests, one after the other, on a pool. A request becomes a run or a bisection."""

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

from flexq_bench.db import queries
from flexq_bench.db.dialects import database_time, lock_for_writing
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.errors import UNAVAILABLE, DatabaseError
from flexq_bench.db.records import CommitInfo, Record
from flexq_bench.db.requests import (
    ClaimedRequest,
    claim_request,
    finish_request,
    renew_request,
    return_requests,
    set_request_detail,
    set_request_run,
)
from flexq_bench.errors import CancelledError, InfrastructureError, MeasureError, UsageError
from flexq_bench.fleet.compare_jobs import CompareJob
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
from flexq_bench.fleet.run_comparer import RunComparer, comparing_run
from flexq_bench.measure.ab import InterleaveRules, Suffices
from flexq_bench.measure.ab.revisions import commits_between, resolve_pair
from flexq_bench.repository.provenance import ROOT
from flexq_bench.repository.worktrees import is_published, repository_of
from flexq_bench.runs.lifecycle import OnRecord, OpenRun, new_run, open_run
from flexq_bench.runs.transactions import run_transaction
from flexq_bench.verdicts import CaseComparison
from flexq_bench.workloads.case import Case

# A server renews the lease of its request for as long as a case, or a comparison with its builds,
# may take. After that it is considered hung, and its lease expires.
LEASE = timedelta(minutes=2)
HEARTBEAT_S = 20.0
MAX_CASE_S = 600.0
MAX_COMPARISON_S = 3600.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was served. run None: it was refused before a run began."""

    request: str  # uuid
    state: str
    run: str | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class BisectionInput:
    """Input of a search by bisection in a repository.

    commits: after good up to bad, oldest first. compare: compares a commit with good, until the
    second argument (InterleaveRules.suffices) is satisfied. device: uuid
    of the device, or of one of several. on_step: called with one line after each comparison.
    """

    repository: Path
    case: Case
    good: str
    commits: Sequence[str]
    device: str
    compare: Callable[[str, Suffices | None], CaseComparison]
    on_step: Callable[[str], None]


# Returns a line with the commit, or with the reason why none was found. Implemented in `ci`.
Search = Callable[[BisectionInput], str]


def server_name() -> str:
    """Name this server: host, PID and, since PIDs are reused, a random suffix."""
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

    A request that can't be measured fails without an exception; so does a request during which
    MAX_DEATHS servers in a row died. An outage of the database is waited for. Raises exceptions of
    the device, DatabaseError for errors that are not an outage, and KeyboardInterrupt. Another
    server then continues the request, at once or when its lease has expired.
    """
    request = _claim(database, kind, server)
    if request is None:
        return None
    log.info("request %s of %s", request.uuid[:8], request.requester)
    leased = _LeasedRequest(database, request, server)
    if request.kind == BISECT:
        return _bisect(database, pool, kind, commit, leased, search)
    try:
        plan = request_plan(request.kind, request.content, kind.backend, kind.capability)
    except PLANNING_REFUSALS as error:
        return leased.finish("failed", request.run, str(error))
    # The key finds the run that an earlier server of this request began.
    planned = replace(
        new_run(plan.suite, "sweep", plan.keys), idempotency_key=f"request {request.uuid}"
    )
    run_uuid = request.run
    try:
        with open_run(database, planned, commit) as run:
            run_uuid = run.info.uuid
            cases = leased.missing_cases(run, plan.cases)
            leased.check_deaths()
            pool.check(cases)
            with leased.renewing(MAX_CASE_S) as restart_limit:

                def renew(record: Record) -> None:
                    restart_limit()
                    leased.renew()
                    on_record(record)

                pool.measure([Work(run, kind.gpu, cases)], renew)
    except MEASURING_REFUSALS as error:
        return leased.finish("failed", run_uuid, str(error))
    except CancelledError as error:
        return Served(request.uuid, "cancelled", run_uuid, str(error))
    except BaseException as error:
        leased.return_after(error)
        if isinstance(error, UNAVAILABLE):
            return Served(request.uuid, "queued", run_uuid, str(error))
        raise
    return leased.finish("done", run_uuid, "")


def _bisect(
    database: Database,
    pool: Pool,
    kind: Kind,
    commit: CommitInfo,
    leased: _LeasedRequest,
    search: Search,
) -> Served:
    """Bisect in this clone; the line about the result becomes the request's detail."""
    request = leased.request
    try:
        bisection = bisection_of(request.content)
        leased.check_deaths()
        pool.check([bisection.case])
        repository = repository_of(ROOT)
        good, bad = (
            revision.commit for revision in resolve_pair(repository, bisection.good, bisection.bad)
        )
        if not is_published(repository, bad):
            raise UsageError(
                f"{bad[:10]} is in no branch and no tag here: a request measures what was merged"
            )
        commits = commits_between(repository, good, bad)
        if not commits:
            raise UsageError(f"no commit after {good[:10]} up to {bad[:10]} changes the code")
        device = pool.machine(kind.gpu).device.uuid
    except PLANNING_REFUSALS as error:
        return leased.finish("failed", None, str(error))
    try:
        with comparing_run(database, pool, kind, commit, repository, BISECT) as comparer:
            compare = _compare_function(comparer, leased, bisection)
            detail = search(
                BisectionInput(
                    repository, bisection.case, good, commits, device, compare, leased.set_detail
                )
            )
    except CancelledError as error:
        return Served(request.uuid, "cancelled", None, str(error))
    except REVISION_REFUSALS as error:
        return leased.finish("failed", None, str(error))
    except BaseException as error:
        leased.return_after(error)
        raise
    return leased.finish("done", None, detail)


def _compare_function(
    comparer: RunComparer, leased: _LeasedRequest, bisection: Bisection
) -> Callable[[str, Suffices | None], CaseComparison]:
    """Return a function that compares a commit with the good one; its calls are limited."""
    comparisons = 0

    def compare(commit: str, suffices: Suffices | None) -> CaseComparison:
        nonlocal comparisons
        if comparisons >= MAX_COMPARISONS:
            raise UsageError(f"{MAX_COMPARISONS} comparisons are done, a request has no more")
        # Renewed before the comparison, so that a server that dies during it counts as a death.
        leased.renew(has_result=comparisons > 0)
        comparisons += 1
        rules = InterleaveRules(suffices=suffices)
        job = CompareJob(bisection.good, commit, (bisection.case,))
        with leased.renewing(MAX_COMPARISON_S):
            (result,) = comparer.compare(job, rules=rules)
        return result

    return compare


class _LeasedRequest:
    """A request that is leased to this server."""

    def __init__(self, database: Database, request: ClaimedRequest, server: str) -> None:
        self._database, self._server = database, server
        self.request = request

    def renew(self, *, has_result: bool = True) -> None:
        """Renew the lease. Raises CancelledError if the request was cancelled."""
        if not run_transaction(
            self._database, lambda session: self._renew_in(session, has_result=has_result)
        ):
            raise CancelledError(f"request {self.request.uuid[:8]} was cancelled")

    @contextmanager
    def renewing(self, longest_s: float) -> Iterator[Callable[[], None]]:
        """Renew the lease during the block, until longest_s seconds have passed without progress.

        Yields the function to call after a result, which restarts the time limit.
        """
        stopped, end = Event(), time.monotonic() + longest_s

        def restart_limit() -> None:
            nonlocal end
            end = time.monotonic() + longest_s

        def renew_repeatedly() -> None:
            while not stopped.wait(HEARTBEAT_S) and time.monotonic() < end:
                try:
                    with self._database.session() as session:
                        if not self._renew_in(session):  # no longer the holder of the lease
                            return
                except UNAVAILABLE:
                    continue
                except DatabaseError as error:
                    log.warning("request %s: no beat was stored: %s", self.request.uuid[:8], error)

        thread = Thread(target=renew_repeatedly, name="request lease", daemon=True)
        thread.start()
        try:
            yield restart_limit
        finally:
            stopped.set()
            thread.join()

    def missing_cases(self, run: OpenRun, cases: Sequence[Case]) -> list[Case]:
        """The run's cases without a result. Also stores the run's uuid with the request."""

        def read_missing(session: Session) -> set[str]:
            set_request_run(session, self.request.uuid, run.info.uuid)
            return set(queries.missing_cases(session, run.info.uuid))

        missing = run_transaction(run.database, read_missing)
        return [case for case in cases if case.key in missing]

    def set_detail(self, line: str) -> None:
        """Store a line about the progress."""
        run_transaction(
            self._database,
            lambda session: set_request_detail(session, self.request.uuid, self._server, line),
        )

    def check_deaths(self) -> None:
        """Raise MeasureError if too many servers died with this request."""
        if is_quarantined(self.request.deaths):
            raise MeasureError(quarantine_detail(self.request.deaths))

    def finish(self, state: str, run: str | None, detail: str) -> Served:
        """Store the end of the request."""
        run_transaction(
            self._database,
            lambda session: finish_request(
                session, self.request.uuid, state, detail=detail, at=database_time(session)
            ),
        )
        return Served(self.request.uuid, state, run, detail)

    def return_after(self, error: BaseException) -> None:
        """Return the request to the queue after an error that the request did not cause.

        After an interrupt this does not wait for an unavailable database. After a failure it waits,
        because a request that is not returned counts as a death.
        """
        if isinstance(error, KeyboardInterrupt):
            with suppress(DatabaseError), self._database.session() as session:
                return_requests(session, self._server)
        elif isinstance(error, (InfrastructureError, *UNAVAILABLE)):
            with suppress(DatabaseError):
                _return_requests(self._database, self._server)

    def _renew_in(self, session: Session, *, has_result: bool = False) -> bool:
        lock_for_writing(session.connection())  # first, as waiting for the lock takes time
        until = database_time(session) + LEASE
        return renew_request(
            session, self.request.uuid, self._server, until=until, has_result=has_result
        )


def _claim(database: Database, kind: Kind, server: str) -> ClaimedRequest | None:
    """Lease the oldest request that fits this kind of device to this server; None: none."""
    while True:
        try:
            with database.session() as session:
                lock_for_writing(session.connection())  # first, as waiting for the lock takes time
                now = database_time(session)
                return claim_request(session, server, (kind.gpu,), until=now + LEASE, at=now)
        except UNAVAILABLE as error:
            log.warning("%s; requests are served when it is back", error)
        # If only the acknowledgement of the commit was lost, a request is leased to this server:
        # return it. Then wait until other servers have renewed their leases, which may have expired
        # during the outage and would count as deaths.
        _return_requests(database, server)
        _wait_for_lease_renewals()


def _wait_for_lease_renewals() -> None:
    time.sleep(2 * HEARTBEAT_S)


def _return_requests(database: Database, server: str) -> None:
    """Return all requests of this server to the queue, after an outage of any length."""
    run_transaction(
        database, lambda session: return_requests(session, server), max_outage_s=math.inf
    )
