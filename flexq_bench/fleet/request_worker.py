"""Serving requests: one after the other becomes a run, measured on the pool that is given."""

from __future__ import annotations

import logging
import os
import platform
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

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
    renew_request,
    return_request,
)
from flexq_bench.errors import CancelledError, InfrastructureError, MeasureError
from flexq_bench.fleet.pool import Kind, Pool, Work
from flexq_bench.fleet.requests import request_plan
from flexq_bench.fleet.retry_policy import (
    MEASURING_REFUSALS,
    PLANNING_REFUSALS,
    is_quarantined,
    quarantine_detail,
)
from flexq_bench.runs.lifecycle import OnRecord, OpenRun, new_run, open_run
from workloads.case import Case

# Longer than any case may take: only between two cases a server says that it is alive.
LEASE = timedelta(minutes=10)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A request that came to an end. run None: it was refused before one began."""

    request: str  # uuid
    state: str
    run: str | None
    detail: str = ""


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
        with suppress(DatabaseError), database.session() as session:
            return_request(session, request.uuid, server)
        raise
    return _finish(database, request, "done", uuid_of_run, "")


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
        with database.session() as session:
            until = database_time(session) + LEASE
            if not renew_request(session, request.uuid, server, until=until):
                raise CancelledError(f"request {request.uuid[:8]} was taken back")
        on_record(record)

    return renew


def _finish(
    database: Database, request: ClaimedRequest, state: str, run: str | None, detail: str
) -> Served:
    with database.session() as session:
        finish_request(session, request.uuid, state, detail=detail, at=database_time(session))
    return Served(request.uuid, state, run, detail)
