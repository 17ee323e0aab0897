"""Queries for nightly runs and for change points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from flexq_bench.db.tables import ChangePoint, Commit, Night, Run, Series


@dataclass(frozen=True, slots=True)
class NightState:
    """State of a nightly run on one GPU model, for commits of one project.

    report: empty until the run is judged.
    """

    key: str
    name: str
    suite: str
    gpu: str
    run: str  # uuid
    commit: str  # sha
    project: str
    dirty: bool
    state: str
    report: dict[str, Any]
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class ChangePointRow:
    """Change point of a series: the commit at which its level changed; levels in its unit.

    retracted: reason of the retraction; None: not retracted.
    """

    id: int
    series_id: int
    commit: str  # sha of the first on the new level
    before: float
    after: float
    retracted: str | None


def night_states(
    session: Session,
    *,
    key: str | None = None,
    name: str | None = None,
    suite: str | None = None,
    project: str | None = None,
    limit: int | None = None,
) -> list[NightState]:
    """Return nightly runs, latest first, then by GPU. None as a filter: all."""
    query = (
        select(
            Night.key,
            Night.name,
            Night.suite,
            Night.gpu,
            Run.uuid.label("run"),
            Commit.sha.label("commit"),
            Commit.project,
            Commit.dirty,
            Night.state,
            Night.report,
            Night.updated_at,
        )
        .join(Run, Night.run_id == Run.id)
        .join(Commit, Run.commit_id == Commit.id)
        .order_by(Night.name.desc(), Night.gpu)
        .limit(limit)
    )
    filters = (
        (Night.key, key),
        (Night.name, name),
        (Night.suite, suite),
        (Commit.project, project),
    )
    for column, value in filters:
        if value is not None:
            query = query.where(column == value)
    return [NightState(**row) for row in session.execute(query).mappings()]


def change_points_of(
    session: Session, series_id: int, *, with_retracted: bool = False
) -> list[ChangePointRow]:
    """Return the stored change points of a series, oldest commit first (ancestry, not clock)."""
    query = (
        select(
            ChangePoint.id,
            ChangePoint.series_id,
            Commit.sha.label("commit"),
            ChangePoint.before,
            ChangePoint.after,
            ChangePoint.retraction_reason.label("retracted"),
        )
        .join(Commit, ChangePoint.commit_id == Commit.id)
        .where(ChangePoint.series_id == series_id)
        .order_by(Commit.topo_order.nulls_last(), ChangePoint.id)
    )
    if not with_retracted:
        query = query.where(ChangePoint.retracted_at.is_(None))
    return [ChangePointRow(**row) for row in session.execute(query).mappings()]


def series_identity_of(session: Session, series_id: int) -> Mapping[str, Any]:
    """Return the full identity of a stored series (db.writer.series_identity)."""
    columns = [
        column for column in Series.__table__.columns if column.name not in ("id", "identity_hash")
    ]
    row = session.execute(select(*columns).where(Series.id == series_id)).mappings().one()
    return {name: value for name, value in row.items() if name != "project" or value}
