"""Queries for accuracy scores of models, and their values by segment or question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from flexq_bench.db.samples import unpack
from flexq_bench.db.tables import AccuracyResult, AccuracySample, Commit, Device, Run


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one task of a model under a scheme; None as in db.tables.AccuracyResult."""

    id: int
    scheme: str
    content_hash: str | None
    through: str
    task: str
    task_version: str
    data_hash: str
    metric: str
    direction: str
    status: str
    detail: str
    value: float | None
    standard_error: float | None
    n_items: int
    parameters: dict[str, Any]
    created_at: datetime
    commit: str  # sha
    topo_order: int | None  # None: not in a git tree
    gpu: str  # SKU
    run: str  # uuid


def scored_models(session: Session) -> tuple[str, ...]:
    """Return all evaluated models, sorted."""
    query = select(AccuracyResult.model).distinct().order_by(AccuracyResult.model)
    return tuple(session.scalars(query))


def scored_schemes(session: Session) -> tuple[str, ...]:
    """Return all evaluated schemes, sorted."""
    query = select(AccuracyResult.scheme).distinct().order_by(AccuracyResult.scheme)
    return tuple(session.scalars(query))


def model_scores(session: Session, model: str) -> list[Score]:
    """Return all scores of a model, oldest commit first (ancestry, not clock), then by time."""
    table = AccuracyResult.__table__.columns
    own = [name for name in Score.__slots__ if name in table and name != "run"]
    query = (
        select(
            *(table[name] for name in own),
            Commit.sha.label("commit"),
            Commit.topo_order,
            Device.sku.label("gpu"),
            Run.uuid.label("run"),
        )
        .join(Commit, AccuracyResult.commit_id == Commit.id)
        .join(Device, AccuracyResult.device_id == Device.id)
        .join(Run, AccuracyResult.run_id == Run.id)
        .where(AccuracyResult.model == model)
        .order_by(Commit.topo_order.nulls_last(), AccuracyResult.created_at, AccuracyResult.id)
    )
    return [Score(**row) for row in session.execute(query).mappings()]


def score_values(session: Session, score_ids: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """Return values per segment, question or layer by score id; scores without any are left out."""
    query = select(AccuracySample.accuracy_result_id, AccuracySample.data, AccuracySample.count)
    rows = session.execute(query.where(AccuracySample.accuracy_result_id.in_(list(score_ids))))
    return {score: unpack(data, [count])[0] for score, data, count in rows}
