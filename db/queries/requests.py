"""Queries for requests to the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from flexq_bench.db.errors import AmbiguousError, NotFoundError
from flexq_bench.db.tables import Request, Run


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request and its state; None as in db.tables.Request. run: uuid of its run."""

    uuid: str
    kind: str
    content: dict[str, Any]
    requester: str
    gpu: str
    state: str
    cases: int
    expected_s: float | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    server: str | None
    run: str | None
    detail: str


def requests(
    session: Session,
    *,
    states: Sequence[str] = (),
    requester: str | None = None,
    requester_prefix: str = "",
    limit: int | None = None,
) -> list[RequestRow]:
    """Return requests, newest first. states: only these; empty: all.

    requester: only this requester's. requester_prefix: only names with this prefix.
    """
    query = _stored().order_by(Request.created_at.desc(), Request.id.desc()).limit(limit)
    if states:
        query = query.where(Request.state.in_(list(states)))
    if requester is not None:
        query = query.where(Request.requester == requester)
    if requester_prefix:
        query = query.where(Request.requester.startswith(requester_prefix, autoescape=True))
    return [RequestRow(**row) for row in session.execute(query).mappings()]


def request_by_uuid_prefix(session: Session, prefix: str) -> RequestRow:
    """Return the request whose uuid begins with `prefix`. Raises NotFoundError, AmbiguousError."""
    begins = Request.uuid.startswith(prefix, autoescape=True)
    rows = session.execute(_stored().where(begins).limit(2)).mappings().all()
    if not rows:
        raise NotFoundError(f"no request begins with {prefix!r}: check it, or name another --db")
    if len(rows) > 1:
        raise AmbiguousError(f"several requests begin with {prefix!r}: write more of it")
    return RequestRow(**rows[0])


def _stored() -> Select[Any]:
    columns = [Request.__table__.columns[name] for name in RequestRow.__slots__ if name != "run"]
    return select(*columns, Run.uuid.label("run")).outerjoin(Run, Request.run_id == Run.id)
