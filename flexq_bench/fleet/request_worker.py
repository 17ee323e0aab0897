"""Serving requests: one after the other becomes a run, measured on the pool that is given, or a
bisection by comparisons on it."""

from __future__ import annotations

import logging
import os
import platform
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from db import queries
from db.clock import database_time
from db.engine import Database
from db.errors import DatabaseError
from db.locking import lock_for_writing
from db.records import CommitInfo, Record
from db.requests import (
    ClaimedRequest,
    claim_request,
    finish_request,
    give_request_run,
    note_request,
    renew_request,
    return_request,
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
    is_quarantined,
    quarantine_detail,
)
from flexq_bench.measure.ab import CaseComparison
from flexq_bench.measure.ab.revisions import commits_between, resolve_pair
from flexq_bench.repository.provenance import ROOT
from flexq_bench.repository.worktrees import repository_of
from flexq_bench.runs.lifecycle import OnRecord, OpenRun, new_run, open_run
from workloads.case import Case

# Longer than any case may take: only between two cases a server says that it is alive.
LEASE = timedelta(minutes=10)
COMPARISON_LEASE = timedelta(hours=1)  # the same of a comparison of two commits: builds, processes

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
    """What a bisection is searched by.

    commits: after good, oldest first, up to bad. compare: measures a commit against good.
    device: the uuid of the device, or of one of several. on_step: called with a line a comparison.
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
    """Who serves: the host and the process, and what tells two of the same number apart."""
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
    MAX_DEATHS servers died in a row. Raises what the device and the database raise, and
    KeyboardInterrupt; the next server then goes on with the request, at once or when its lease has
    run out.
    """
    with database.session() as session:
        lock_for_writing(session.connection())  # the time after waiting for it counts
        now = database_time(session)
        request = claim_request(session, server, (kind.gpu,), until=now + LEASE, at=now)
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
            pool.measure(
                [Work(run, kind.gpu, cases)], _renewing(database, request, server, on_record)
            )
    except MEASURING_REFUSALS as error:
        return _finish(database, request, "failed", uuid_of_run, str(error))
    except CancelledError as error:
        return Served(request.uuid, "cancelled", uuid_of_run, str(error))
    except (KeyboardInterrupt, InfrastructureError):
        _give_back(database, request, server)
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
        with database.session() as session:
            note_request(session, request.uuid, server, line)

    try:
        wanted = bisection_of(request.content)
        if is_quarantined(request.deaths):
            raise MeasureError(quarantine_detail(request.deaths))
        pool.check([wanted.case])
        repository = repository_of(ROOT)
        good, bad = (one.commit for one in resolve_pair(repository, wanted.good, wanted.bad))
        commits = commits_between(repository, good, bad)
        if not commits:
            raise UsageError(f"no commit after {good[:10]} up to {bad[:10]} changes the code")
        compare = _comparing(database, pool, kind, request, server, wanted, repository)
        device = pool.machine(kind.gpu).device.uuid
        words = search(Question(wanted.case, good, commits, device, compare, on_step))
    except CancelledError as error:
        return Served(request.uuid, "cancelled", None, str(error))
    except (*PLANNING_REFUSALS, MeasureError, InfrastructureError) as error:
        return _finish(database, request, "failed", None, str(error))
    except KeyboardInterrupt:
        _give_back(database, request, server)
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
        _renew(database, request, server, COMPARISON_LEASE, has_result=done > 0)
        done += 1
        (compared,) = pool.compare(kind.gpu, repository, wanted.good, commit, [wanted.case])
        return compared

    return compare


def _still_missing(run: OpenRun, request: ClaimedRequest, cases: Sequence[Case]) -> list[Case]:
    """The cases that the run lacks; the request is told which run it became."""
    with run.database.session() as session:
        give_request_run(session, request.uuid, run.info.uuid)
        missing = set(queries.missing_cases(session, run.info.uuid))
    return [case for case in cases if case.key in missing]


def _renewing(
    database: Database, request: ClaimedRequest, server: str, on_record: OnRecord
) -> OnRecord:
    def renew(record: Record) -> None:
        _renew(database, request, server, LEASE)
        on_record(record)

    return renew


def _renew(
    database: Database,
    request: ClaimedRequest,
    server: str,
    lease: timedelta,
    *,
    has_result: bool = True,
) -> None:
    """Say that this server is at it. Raises CancelledError if the request was taken back."""
    with database.session() as session:
        until = database_time(session) + lease
        if not renew_request(session, request.uuid, server, until=until, has_result=has_result):
            raise CancelledError(f"request {request.uuid[:8]} was taken back")


def _give_back(database: Database, request: ClaimedRequest, server: str) -> None:
    """Leave the request to the next server, where the database still answers."""
    with suppress(DatabaseError), database.session() as session:
        return_request(session, request.uuid, server)


def _finish(
    database: Database, request: ClaimedRequest, state: str, run: str | None, detail: str
) -> Served:
    with database.session() as session:
        finish_request(session, request.uuid, state, detail=detail, at=database_time(session))
    return Served(request.uuid, state, run, detail)
