"""Queries for whole models: the newest score, decode and serving result of each kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Select, func, select, union
from sqlalchemy.orm import Session

from flexq_bench.db.tables import AccuracyResult, DecodeResult, Device, Run, ServingResult

SYNTHETIC = "synthetic"  # decode weights: random values in the model's shapes


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One metric of one task of a model under a scheme. standard_error None: not reported."""

    model: str
    scheme: str
    through: str
    task: str
    metric: str
    value: float
    standard_error: float | None
    gpu: str
    run: str  # uuid
    created_at: datetime


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One decode of a model under a scheme; None as in db.tables.DecodeResult."""

    model: str
    weights: str
    scheme: str
    kv_bits: int
    batch: int
    prompt_tokens: int
    new_tokens: int
    status: str
    detail: str
    prefill_ms: float | None
    token_ms: float | None
    token_ci_low_ms: float | None
    token_ci_high_ms: float | None
    token_p95_ms: float | None
    tokens_per_s: float | None
    weights_bytes: int | None
    peak_memory_bytes: int | None
    gpu: str
    run: str  # uuid
    created_at: datetime
    content_hash: str | None = None


@dataclass(frozen=True, slots=True)
class ServingRow:
    """One serving run of a model under a scheme; None as in db.tables.ServingResult."""

    model: str
    weights: str
    scheme: str
    kv_bits: int
    batch_limit: int
    memory_limit_bytes: int | None
    requests: int
    lengths: str
    status: str
    detail: str
    tokens_per_s: float | None
    latency_p50_s: float | None
    latency_p95_s: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    token_p50_ms: float | None
    token_p95_ms: float | None
    weights_bytes: int | None
    steady_memory_bytes: int | None
    parameters: dict[str, Any]
    gpu: str
    run: str  # uuid
    created_at: datetime

    @property
    def slots(self) -> int:
        """Concurrent sequences: batch_limit, or fewer if memory or requests limit it."""
        return int(self.parameters.get("slots", self.batch_limit))


def latest_scores(session: Session, models: Sequence[str]) -> list[ScoreRow]:
    """Return the newest valid score for each model, scheme, through, task, metric and GPU."""
    table = AccuracyResult
    query = (
        select(
            table.model, table.scheme, table.through, table.task, table.metric, table.value,
            table.standard_error,
            Device.sku.label("gpu"), Run.uuid.label("run"), table.created_at,
        )
        .join(Device, table.device_id == Device.id)
        .join(Run, table.run_id == Run.id)
        .where(table.model.in_(list(models)), table.status == "ok", table.value.is_not(None))
        .order_by(table.created_at, table.id)
    )  # fmt: skip
    rows = [ScoreRow(**row) for row in session.execute(query).mappings()]
    return list({(r.model, r.scheme, r.through, r.task, r.metric, r.gpu): r for r in rows}.values())


def latest_decodes(
    session: Session, *, model: str | None = None, also_failed: bool = False
) -> list[DecodeRow]:
    """Return the newest decode for each model, weights, scheme, KV cache, batch, lengths and GPU.

    model: only this one. also_failed: include failed and refused decodes.
    """
    query = _with_gpu_and_run(DecodeResult, DecodeRow)
    if model is not None:
        query = query.where(DecodeResult.model == model)
    if not also_failed:
        query = query.where(DecodeResult.status == "ok")
    rows = [DecodeRow(**row) for row in session.execute(query).mappings()]
    return list(
        {
            (r.model, r.weights, r.scheme, r.kv_bits, r.batch, r.prompt_tokens, r.new_tokens,
             r.gpu): r
            for r in rows
        }.values()
    )  # fmt: skip


def checkpoint_decodes(session: Session, model: str, hashes: Sequence[str]) -> list[DecodeRow]:
    """Return the newest valid decodes of these checkpoints, and of the model's random weights.

    One result for each content hash (for random weights: scheme), KV cache, batch, lengths and GPU.
    """
    table = DecodeResult
    synthetic = (table.model == model) & (table.weights == SYNTHETIC)
    query = _with_gpu_and_run(table, DecodeRow).where(
        table.status == "ok",
        table.token_ms.is_not(None),
        table.content_hash.in_(list(hashes)) | synthetic,
    )
    rows = [DecodeRow(**row) for row in session.execute(query).mappings()]
    return list(
        {
            (r.content_hash, r.scheme, r.kv_bits, r.batch, r.prompt_tokens, r.new_tokens, r.gpu): r
            for r in rows
        }.values()
    )


def latest_servings(session: Session, *, model: str) -> list[ServingRow]:
    """Return the newest serving for each weights, scheme, KV cache, limits, requests and GPU."""
    query = _with_gpu_and_run(ServingResult, ServingRow).where(ServingResult.model == model)
    rows = [ServingRow(**row) for row in session.execute(query).mappings()]
    return list(
        {
            (r.weights, r.scheme, r.kv_bits, r.batch_limit, r.memory_limit_bytes, r.requests,
             r.lengths, r.gpu): r
            for r in rows
        }.values()
    )  # fmt: skip


def _with_gpu_and_run(
    table: type[DecodeResult] | type[ServingResult], row: type[DecodeRow] | type[ServingRow]
) -> Select[Any]:
    """Select the columns of a row, oldest result first."""
    columns = table.__table__.columns
    own = [f.name for f in fields(row) if f.name in columns and f.name != "run"]
    return (
        select(*(columns[name] for name in own), Device.sku.label("gpu"), Run.uuid.label("run"))
        .join(Device, table.device_id == Device.id)
        .join(Run, table.run_id == Run.id)
        .order_by(table.created_at, table.id)
    )


def decoded_models(session: Session) -> tuple[str, ...]:
    """Return all decoded or served models, sorted."""
    query = union(select(DecodeResult.model), select(ServingResult.model))
    return tuple(sorted(session.scalars(query)))


def decoded_schemes(session: Session) -> tuple[str, ...]:
    """Return all decoded or served schemes, sorted."""
    query = union(select(DecodeResult.scheme), select(ServingResult.scheme))
    return tuple(sorted(session.scalars(query)))


@dataclass(frozen=True, slots=True)
class ModelResults:
    """Number of scores, decodes and servings of a run, and their SKUs."""

    count: int
    gpus: tuple[str, ...]


def model_results(session: Session, run_uuids: Sequence[str]) -> dict[str, ModelResults]:
    """Return whole-model results by run; runs without any are left out."""
    counts: Counter[str] = Counter()
    gpus: dict[str, set[str]] = defaultdict(set)
    for table in (AccuracyResult, DecodeResult, ServingResult):
        rows = session.execute(
            select(Run.uuid, Device.sku, func.count())
            .join(table, table.run_id == Run.id)
            .join(Device, table.device_id == Device.id)
            .where(Run.uuid.in_(run_uuids))
            .group_by(Run.uuid, Device.sku)
        )
        for uuid, gpu, count in rows:
            counts[uuid] += count
            gpus[uuid].add(gpu)
    return {uuid: ModelResults(count, tuple(sorted(gpus[uuid]))) for uuid, count in counts.items()}
