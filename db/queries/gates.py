"""Queries for decisions of accuracy gates: their history, and the original records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, select
from sqlalchemy.orm import Session

from flexq_bench.db.gate_records import GateLimit, GateRecord
from flexq_bench.db.queries.filters import Filters
from flexq_bench.db.queries.records import commit_info
from flexq_bench.db.queries.runs import run_info
from flexq_bench.db.records import DeviceInfo, RunInfo
from flexq_bench.db.tables import AccuracyGate, Commit, Device, Environment, Run

_COLUMNS = tuple(
    f.name
    for f in fields(GateRecord)
    if f.name in AccuracyGate.__table__.columns and f.name not in {"created_at", "limits"}
)


@dataclass(frozen=True, slots=True)
class GateRow:
    """One verdict on a scheme of a model; None as in db.gate_records."""

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


def export_gates(session: Session, filters: Filters) -> Iterator[GateRecord]:
    """Iterate over gate records that match; none if a filter does not apply to them."""
    if not filters.can_match_models():
        return
    query = (
        select(AccuracyGate, Commit, Device, Environment, Run.uuid.label("run_uuid"))
        .join(Run, AccuracyGate.run_id == Run.id)
        .join(Commit, AccuracyGate.commit_id == Commit.id)
        .join(Device, AccuracyGate.device_id == Device.id)
        .join(Environment, AccuracyGate.environment_id == Environment.id)
        .order_by(Run.created_at, Run.uuid, AccuracyGate.created_at, AccuracyGate.uuid)
    )
    for column, values in (
        (Run.uuid, filters.runs),
        (Run.suite, filters.suites),
        (AccuracyGate.model, filters.models),
        (Device.sku, filters.gpus),
    ):
        if values:
            query = query.where(column.in_(values))
    for row in session.execute(query).mappings():
        yield _record(row, run_info(session, row["run_uuid"]))


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


def _record(row: RowMapping, run: RunInfo) -> GateRecord:
    gate: AccuracyGate = row["AccuracyGate"]
    device: Device = row["Device"]
    return GateRecord(
        **{name: getattr(gate, name) for name in _COLUMNS},
        limits=_limits(gate),
        created_at=gate.created_at.isoformat(),
        run=run,
        commit=commit_info(row["Commit"]),
        device=DeviceInfo(**{f.name: getattr(device, f.name) for f in fields(DeviceInfo)}),
        environment=row["Environment"].content,
    )


def _limits(gate: AccuracyGate) -> tuple[GateLimit, ...]:
    return tuple(GateLimit(**limit) for limit in gate.limits)
