"""Serving requests: one after the other becomes a run, measured on the station that is given."""

from __future__ import annotations

import logging
import os
import platform
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from db import queries
from db.engine import Database
from db.records import CommitInfo, Record, RunInfo
from db.requests import (
    ClaimedRequest,
    claim_request,
    finish_request,
    give_request_run,
    renew_request,
)
from db.store import begin_run, finish_run
from flexq_bench.errors import CancelledError, FlexqError, MeasureError
from flexq_bench.execution import LocalExecutor
from flexq_bench.requests import request_plan
from flexq_bench.running import OnRecord, execute_plan, new_run
from kernels.contract import Backend, Capability
from kernels.errors import KernelError
from workloads.case import Case
from workloads.errors import WorkloadError

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


class Station(Protocol):
    """A kind of device, and how it is measured on."""

    @property
    def gpu(self) -> str:
        """SKU."""
        ...

    @property
    def backend(self) -> Backend: ...

    @property
    def capability(self) -> Capability | None: ...

    def measure(
        self,
        database: Database,
        cases: Sequence[Case],
        run: RunInfo,
        commit: CommitInfo,
        *,
        on_record: OnRecord,
    ) -> None:
        """Declare the run and measure these cases of it, as execute_plan does."""
        ...


class LocalStation:
    """This process on its device."""

    def __init__(self, executor: LocalExecutor) -> None:
        self._executor = executor

    @property
    def gpu(self) -> str:
        return self._executor.gpu

    @property
    def backend(self) -> Backend:
        return self._executor.backend

    @property
    def capability(self) -> Capability | None:
        return self._executor.capability

    def measure(
        self,
        database: Database,
        cases: Sequence[Case],
        run: RunInfo,
        commit: CommitInfo,
        *,
        on_record: OnRecord,
    ) -> None:
        self._executor.check(cases)
        execute_plan(database, self._executor, cases, run, commit, on_record=on_record)


def server_name() -> str:
    """Who serves: the host and the process, and what tells two of the same number apart."""
    return f"{platform.node()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


def serve_next(
    database: Database,
    station: Station,
    commit: CommitInfo,
    server: str,
    *,
    on_record: OnRecord,
) -> Served | None:
    """Measure the oldest request that fits the station; None: there is none.

    What can't be measured as asked is a failed request, not an exception. Raises what the device
    and the database raise; the request's lease then runs out, and the next server goes on with it.
    """
    now = datetime.now(UTC)
    with database.session() as session:
        request = claim_request(session, server, (station.gpu,), until=now + LEASE, at=now)
    if request is None:
        return None
    log.info("request %s of %s", request.uuid[:8], request.requester)
    try:
        plan = request_plan(request.kind, request.content, station.backend, station.capability)
    except (FlexqError, WorkloadError, KernelError) as error:
        return _finish(database, request, "failed", request.run, str(error))
    run = _run_of(database, request, plan.suite, plan.keys, commit)
    try:
        cases = _still_missing(database, run, plan.cases)
        renewing = _renewing(database, request, server, on_record)
        station.measure(database, cases, run, commit, on_record=renewing)
    except MeasureError as error:
        with database.session() as session:
            finish_run(session, run.uuid, "failed")
        return _finish(database, request, "failed", run.uuid, str(error))
    except CancelledError as error:
        return Served(request.uuid, "cancelled", run.uuid, str(error))
    return _finish(database, request, "done", run.uuid, "")


def _run_of(
    database: Database,
    request: ClaimedRequest,
    suite: str,
    plan: Sequence[str],
    commit: CommitInfo,
) -> RunInfo:
    """The run of a request: the one it has, where a server died, else a new one."""
    planned = replace(new_run(suite, "sweep", plan), idempotency_key=f"request {request.uuid}")
    with database.session() as session:
        run = begin_run(session, planned, commit)
        give_request_run(session, request.uuid, run.uuid)
    return run


def _still_missing(database: Database, run: RunInfo, cases: Sequence[Case]) -> list[Case]:
    with database.session() as session:
        missing = set(queries.missing_cases(session, run.uuid))
    return [case for case in cases if case.key in missing]


def _renewing(
    database: Database, request: ClaimedRequest, server: str, on_record: OnRecord
) -> OnRecord:
    def renew(record: Record) -> None:
        until = datetime.now(UTC) + LEASE
        with database.session() as session:
            if not renew_request(session, request.uuid, server, until=until):
                raise CancelledError(f"request {request.uuid[:8]} was taken back")
        on_record(record)

    return renew


def _finish(
    database: Database, request: ClaimedRequest, state: str, run: str | None, detail: str
) -> Served:
    with database.session() as session:
        finish_request(session, request.uuid, state, detail=detail, at=datetime.now(UTC))
    return Served(request.uuid, state, run, detail)
