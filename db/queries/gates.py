"""Queries for decisions of accuracy gates: their history, and the original records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, select
from sqlalchemy.orm import Session

from flexq_bench.db.records import GateLimit
from flexq_bench.db.tables import AccuracyGate, Commit, Device, Run


@dataclass(frozen=True, slots=True)
class GateRow:
    """One verdict on a scheme of a model; None as in db.records."""

    uuid: str
    scheme: str
    content_hash: str | None
    through: str
    base: str
    policy: str
    policy_version: int
    policy_hash: str
    verdict: str
    exit_code: int
    limits: tuple[GateLimit, ...]
    created_at: datetime
    commit: str  # sha
    dirty: bool
    gpu: str  # SKU
    run: str  # uuid
    reference: str | None = None
    reference_hash: str | None = None
    diagnosis: dict[str, Any] | None = None


def gate_history(session: Session, model: str, *, limit: int) -> list[GateRow]:
    """Return the newest gate verdicts on a model, newest first."""
    query = (
        select(
            AccuracyGate,
            Commit.sha,
            Commit.dirty,
            Device.sku.label("gpu"),
            Run.uuid.label("run_uuid"),
        )
        .join(Commit, AccuracyGate.commit_id == Commit.id)
        .join(Device, AccuracyGate.device_id == Device.id)
        .join(Run, AccuracyGate.run_id == Run.id)
        .where(AccuracyGate.model == model)
        .order_by(AccuracyGate.created_at.desc(), AccuracyGate.id.desc())
        .limit(limit)
    )
    return [_history_row(row) for row in session.execute(query).mappings()]


def _history_row(row: RowMapping) -> GateRow:
    gate: AccuracyGate = row["AccuracyGate"]
    own = {
        name: getattr(gate, name)
        for name in GateRow.__slots__
        if name in AccuracyGate.__table__.columns and name != "limits"
    }
    return GateRow(
        **own,
        limits=_limits(gate),
        commit=row["sha"],
        dirty=row["dirty"],
        gpu=row["gpu"],
        run=row["run_uuid"],
    )


def _limits(gate: AccuracyGate) -> tuple[GateLimit, ...]:
    return tuple(GateLimit(**limit) for limit in gate.limits)
