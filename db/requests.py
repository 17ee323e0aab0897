"""Write requests for measurements by the fleet. Each call takes the writer's lock, like db.store.

A request's content is data validated by the service; it is never executed as code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, insert, or_, select, update
from sqlalchemy.orm import Session

from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.errors import LimitError, NotFoundError, RecordError
from flexq_bench.db.leases import QUEUED, REQUEST_LEASES
from flexq_bench.db.tables import Request, Run
from flexq_bench.db.writer import stored_run_id

REQUEST_KINDS = ("sweep", "suite", "bisect")
REQUEST_STATES = (
    "queued",  # not yet claimed by a server
    "running",  # leased to a server until lease_until
    "done",  # its run is complete
    "failed",  # it could not be measured; see detail
    "cancelled",  # cancelled before it finished
)
OPEN_REQUEST_STATES = ("queued", "running")


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Request for measurements. content: validated plain JSON; gpu: a SKU, empty: any.

    cases: number of results; for a bisection, the maximum number of comparisons.
    expected_s None: no similar case was measured before, or it is a bisection.
    """

    uuid: str
    kind: str  # one of REQUEST_KINDS
    content: Mapping[str, Any]
    requester: str
    gpu: str
    cases: int
    expected_s: float | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on open (queued or running) requests.

    requests, cases: per requester. cases_of_one: per request. requests_of_all, cases_of_all: over
    all requesters.
    """

    requests: int
    cases: int
    cases_of_one: int
    requests_of_all: int
    cases_of_all: int


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    """A request leased to a server. run None: it has no run yet.

    deaths: consecutive earlier servers that died during the lease without storing a result.
    """

    uuid: str
    kind: str
    content: dict[str, Any]
    requester: str
    run: str | None
    deaths: int


def add_request(session: Session, info: RequestInfo, *, limits: Limits) -> None:
    """Queue a request; no effect if its uuid is stored.

    Raises RecordError if its kind is unknown or it has no case, LimitError if it exceeds the limit
    on one request, or would exceed those of its requester or of all requesters.
    """
    if info.kind not in REQUEST_KINDS:
        raise RecordError(f"kind is {info.kind!r}, not one of {', '.join(REQUEST_KINDS)}")
    if info.cases < 1:
        raise RecordError(f"a request has at least one case, got {info.cases}")
    if info.cases > limits.cases_of_one:
        raise LimitError(
            f"this request has {info.cases:,} cases, and one may have {limits.cases_of_one:,}: "
            "leave some sizes or kernels out"
        )
    lock_for_writing(session.connection())
    if session.scalar(select(Request.id).where(Request.uuid == info.uuid)) is not None:
        return
    open_totals = select(func.count(), func.coalesce(func.sum(Request.cases), 0)).where(
        Request.state.in_(OPEN_REQUEST_STATES)
    )
    count, cases = session.execute(open_totals.where(Request.requester == info.requester)).one()
    if count >= limits.requests or cases + info.cases > limits.cases:
        raise LimitError(
            f"{info.requester} has {count} open requests of {cases} cases, and may have "
            f"{limits.requests} of {limits.cases}: {info.cases} more must wait, or cancel one "
            "(flexq-bench status --cancel REQUEST)"
        )
    count, cases = session.execute(open_totals).one()
    if count >= limits.requests_of_all or cases + info.cases > limits.cases_of_all:
        raise LimitError(
            f"{count} requests of {cases} cases are open, and all requesters together may have "
            f"{limits.requests_of_all} of {limits.cases_of_all}: {info.cases} more must wait"
        )
    session.execute(
        insert(Request).values(
            {name: getattr(info, name) for name in info.__slots__}
            | {"content": dict(info.content), "state": "queued", "detail": ""}
        )
    )


def claim_request(
    session: Session, server: str, gpus: Sequence[str], *, until: datetime, at: datetime
) -> ClaimedRequest | None:
    """Lease the oldest free request for one of these SKUs; None: there is none.

    A request whose lease has expired can be claimed again; its run is then resumed.
    """
    lock_for_writing(session.connection())
    oldest = session.execute(
        select(*Request.__table__.columns, Run.uuid.label("run"))
        .outerjoin(Run, Request.run_id == Run.id)
        .where(
            REQUEST_LEASES.is_free(at, until - at),
            or_(Request.gpu == "", Request.gpu.in_(gpus)),
        )
        .order_by(Request.created_at, Request.id)
        .limit(1)
    ).one_or_none()
    if oldest is None:
        return None
    deaths = oldest.deaths + int(oldest.state == REQUEST_LEASES.leased_state)
    started_at = oldest.started_at or at
    REQUEST_LEASES.claim(
        session, {oldest.id: server}, until=until, started_at=started_at, deaths=deaths
    )
    return ClaimedRequest(
        oldest.uuid, oldest.kind, oldest.content, oldest.requester, oldest.run, deaths
    )


def renew_request(
    session: Session, uuid: str, server: str, *, until: datetime, has_result: bool = True
) -> bool:
    """Extend a server's lease; False: the request was cancelled, or another server has it.

    has_result: a result was stored during this lease; resets the count of deaths.
    """
    lock_for_writing(session.connection())
    changes = {"deaths": 0} if has_result else {}
    return REQUEST_LEASES.renew(session, [server], Request.uuid == uuid, until=until, **changes)


def return_requests(session: Session, server: str) -> None:
    """Queue the requests leased to a server again; not counted as a death."""
    lock_for_writing(session.connection())
    is_running = Request.state == REQUEST_LEASES.leased_state
    session.execute(
        update(Request)
        .where(Request.server == server, is_running)
        .values(state=QUEUED, lease_until=None)
    )


def set_request_run(session: Session, uuid: str, run_uuid: str) -> None:
    """Set the run of a request. Raises NotFoundError if either is not stored."""
    lock_for_writing(session.connection())
    _set(session, uuid, {"run_id": stored_run_id(session, run_uuid)})


def set_request_detail(session: Session, uuid: str, server: str, detail: str) -> None:
    """Set the progress text of a request; no effect if this server does not hold it."""
    lock_for_writing(session.connection())
    is_running = Request.state == REQUEST_LEASES.leased_state
    session.execute(
        update(Request)
        .where(Request.uuid == uuid, Request.server == server, is_running)
        .values(detail=detail)
    )


def finish_request(
    session: Session, uuid: str, state: str, *, detail: str = "", at: datetime
) -> None:
    """Set the final state of a request; one that was cancelled meanwhile stays cancelled.

    Raises NotFoundError, RecordError if the state is unknown or not final.
    """
    if state not in REQUEST_STATES or state in OPEN_REQUEST_STATES:
        ends = [s for s in REQUEST_STATES if s not in OPEN_REQUEST_STATES]
        raise RecordError(f"state is {state!r}, not one of {', '.join(ends)}")
    lock_for_writing(session.connection())
    now = session.scalar(select(Request.state).where(Request.uuid == uuid))
    if now != "cancelled":
        values = {"state": state, "detail": detail, "finished_at": at, "lease_until": None}
        _set(session, uuid, values)


def cancel_request(session: Session, uuid: str, *, person: str, at: datetime) -> None:
    """Cancel a request. If it is running, it stops after its current case.

    Raises NotFoundError, RecordError if it has ended.
    """
    lock_for_writing(session.connection())
    state = session.scalar(select(Request.state).where(Request.uuid == uuid))
    if state is not None and state not in OPEN_REQUEST_STATES:
        raise RecordError(f"request {uuid[:8]} is {state} already: there is nothing to cancel")
    detail = f"cancelled by {person}"
    _set(session, uuid, {"state": "cancelled", "detail": detail, "finished_at": at})


def _set(session: Session, uuid: str, values: Mapping[str, Any]) -> None:
    changed = session.execute(
        update(Request).where(Request.uuid == uuid).values(values).returning(Request.id)
    )
    if changed.first() is None:
        raise NotFoundError(f"no request {uuid} is stored: name another database with --db")
