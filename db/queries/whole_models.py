"""Questions about whole models: the newest score and the newest decode of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.tables import AccuracyResult, DecodeResult, Device, Run


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One metric of one task of a model under a scheme. standard_error None: there is none."""

    model: str
    scheme: str
    task: str
    metric: str
    value: float
    standard_error: float | None
    gpu: str
    run: str  # uuid
    created_at: datetime


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One decode of a model under a scheme; nulls as in db.tables.DecodeResult."""

    model: str
    scheme: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    token_ms: float | None
    token_ci_low_ms: float | None
    token_ci_high_ms: float | None
    peak_memory_bytes: int | None
    gpu: str
    run: str  # uuid
    created_at: datetime


def latest_scores(session: Session, models: Sequence[str]) -> list[ScoreRow]:
    """The newest right score of these models for each scheme, task, metric and GPU."""
    table = AccuracyResult
    query = (
        select(
            table.model, table.scheme, table.task, table.metric, table.value, table.standard_error,
            Device.sku.label("gpu"), Run.uuid.label("run"), table.created_at,
        )
        .join(Device, table.device_id == Device.id)
        .join(Run, table.run_id == Run.id)
        .where(table.model.in_(list(models)), table.status == "ok", table.value.is_not(None))
        .order_by(table.created_at, table.id)
    )  # fmt: skip
    found = [ScoreRow(**row) for row in session.execute(query).mappings()]
    return list({(r.model, r.scheme, r.task, r.metric, r.gpu): r for r in found}.values())


def latest_decodes(session: Session) -> list[DecodeRow]:
    """The newest right decode of each model, scheme, batch, lengths and GPU."""
    table = DecodeResult
    query = (
        select(
            table.model, table.scheme, table.batch, table.prompt_tokens, table.new_tokens,
            table.token_ms, table.token_ci_low_ms, table.token_ci_high_ms,
            table.peak_memory_bytes,
            Device.sku.label("gpu"), Run.uuid.label("run"), table.created_at,
        )
        .join(Device, table.device_id == Device.id)
        .join(Run, table.run_id == Run.id)
        .where(table.status == "ok")
        .order_by(table.created_at, table.id)
    )  # fmt: skip
    found = [DecodeRow(**row) for row in session.execute(query).mappings()]
    return list(
        {
            (r.model, r.scheme, r.batch, r.prompt_tokens, r.new_tokens, r.gpu): r for r in found
        }.values()
    )
