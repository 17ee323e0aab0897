"""Queries for whole models: scores, decodes, servings, and decisions of accuracy gates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, TypeVar

from sqlalchemy import Select, func, select, tuple_, union
from sqlalchemy.orm import Session, aliased

from flexq_bench.db.queries.rows import columns_of, rows_of
from flexq_bench.db.records import GateLimit
from flexq_bench.db.samples import unpack
from flexq_bench.db.tables import (
    AccuracyGate,
    AccuracyResult,
    AccuracySample,
    Commit,
    DecodeResult,
    Device,
    Run,
    ServingResult,
)

T = TypeVar("T")
SYNTHETIC = "synthetic"  # decode weights: random values in the model's shapes


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One metric of one task of a model under a scheme. standard_error None: not reported.

    data_hash: of the text, or of all prompts. n_items: tokens or questions evaluated.
    """

    model: str
    scheme: str
    through: str
    task: str
    data_hash: str
    n_items: int
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
    parts: Sequence[Mapping[str, Any]] = ()  # part and us of a step's parts


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
    """Return the newest valid score of each metric of a text or task, by model, scheme and GPU."""
    table = AccuracyResult
    query = _with_gpu_and_run(table, ScoreRow).where(
        table.model.in_(list(models)), table.status == "ok", table.value.is_not(None)
    )
    return _newest(
        session, ScoreRow, query, "model scheme through task data_hash n_items metric gpu"
    )


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
    key = "model weights scheme kv_bits batch prompt_tokens new_tokens gpu"
    return _newest(session, DecodeRow, query, key)


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
    key = "content_hash scheme kv_bits batch prompt_tokens new_tokens gpu"
    return _newest(session, DecodeRow, query, key)


def latest_servings(session: Session, *, model: str) -> list[ServingRow]:
    """Return the newest serving for each weights, scheme, KV cache, limits, requests and GPU."""
    query = _with_gpu_and_run(ServingResult, ServingRow).where(ServingResult.model == model)
    key = "weights scheme kv_bits batch_limit memory_limit_bytes requests lengths gpu"
    return _newest(session, ServingRow, query, key)


def _newest(session: Session, row: type[T], query: Select[Any], key: str) -> list[T]:
    """Return the last row of each combination of the fields named in `key`."""
    values_of = attrgetter(*key.split())
    return list({values_of(result): result for result in rows_of(session, row, query)}.values())


def _with_gpu_and_run(table: Any, row: Any) -> Select[Any]:
    """Select the columns of a row, oldest result first."""
    return (
        select(*columns_of(row, table, gpu=Device.sku, run=Run.uuid))
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


def _of_model(
    row: type[Any], table: type[AccuracyResult | AccuracyGate], model: str | None
) -> Select[Any]:
    """Select the columns of a row from a table's entries of a model, with commit, GPU and run.

    model None: of all models.
    """
    query = (
        select(
            *columns_of(
                *(row, table, Commit),
                commit=Commit.sha,
                topo_order=Commit.position,
                gpu=Device.sku,
                run=Run.uuid,
            )
        )
        .join(Commit, table.commit_id == Commit.id)
        .join(Device, table.device_id == Device.id)
        .join(Run, table.run_id == Run.id)
    )
    return query if model is None else query.where(table.model == model)


def model_scores(session: Session, model: str) -> list[Score]:
    """Return the scores of a model on the main line, oldest commit first, then by time."""
    on_main = _of_model(Score, AccuracyResult, model).where(Commit.position.is_not(None))
    query = on_main.order_by(Commit.position, AccuracyResult.created_at, AccuracyResult.id)
    return rows_of(session, Score, query)


def score_values(session: Session, score_ids: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """Return values per segment, question or layer by score id; scores without any are left out."""
    query = select(AccuracySample.accuracy_result_id, AccuracySample.data, AccuracySample.count)
    rows = session.execute(query.where(AccuracySample.accuracy_result_id.in_(list(score_ids))))
    return {score: unpack(data, [count])[0] for score, data, count in rows}


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
    model: str = ""
    reference: str | None = None
    reference_hash: str | None = None
    diagnosis: dict[str, Any] | None = None


def latest_gates(session: Session, model: str | None = None) -> list[GateRow]:
    """Return the newest verdict on each checkpoint or scheme by each policy, newest first.

    model None: of all models.
    """
    later = aliased(AccuracyGate)
    same = (AccuracyGate.model, AccuracyGate.scheme, AccuracyGate.policy)
    is_same = [column == getattr(later, column.key) for column in same]
    is_later = tuple_(later.created_at, later.id) > tuple_(AccuracyGate.created_at, AccuracyGate.id)
    of_same = AccuracyGate.content_hash.is_not_distinct_from(later.content_hash)
    query = (
        _of_model(GateRow, AccuracyGate, model)
        .where(~select(later.id).where(*is_same, of_same, is_later).exists())
        .order_by(AccuracyGate.created_at.desc(), AccuracyGate.id.desc())
    )
    return _gate_rows(session, query)


def gate_history(session: Session, model: str, *, limit: int) -> list[GateRow]:
    """Return the newest gate verdicts on a model, newest first."""
    query = (
        _of_model(GateRow, AccuracyGate, model)
        .order_by(AccuracyGate.created_at.desc(), AccuracyGate.id.desc())
        .limit(limit)
    )
    return _gate_rows(session, query)


def suite_gates(session: Session, suite: str, *, limit: int) -> list[GateRow]:
    """Return the newest gate verdicts of runs of a suite, on any model, newest first."""
    query = (
        _of_model(GateRow, AccuracyGate, None)
        .where(Run.suite == suite)
        .order_by(AccuracyGate.created_at.desc(), AccuracyGate.id.desc())
        .limit(limit)
    )
    return _gate_rows(session, query)


def _gate_rows(session: Session, query: Select[Any]) -> list[GateRow]:
    return [
        GateRow(**{**row, "limits": tuple(GateLimit(**limit) for limit in row["limits"])})
        for row in session.execute(query).mappings()
    ]
