"""Tables of whole-model results and of values published in papers."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from flexq_bench.db.tables.base import Base


class AccuracyResult(Base):
    """One metric of one task of a model under a scheme."""

    __tablename__ = "accuracy_result"
    __table_args__ = (
        Index(None, "model", "scheme", "task"),
        Index(None, "run_id"),
        Index(None, "content_hash"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    created_at: Mapped[datetime]
    model: Mapped[str]
    model_hash: Mapped[str]  # of the weights evaluated
    scheme: Mapped[str]
    scheme_version: Mapped[int | None] = mapped_column(BigInteger)  # null: fp16, or not recorded
    content_hash: Mapped[str | None]  # of the checkpoint; null: fp16, or unknown
    through: Mapped[str]  # computation of the quantized layers: reference, kernels
    bos: Mapped[str | None]  # BOS position: segment, text, none; null: no text, or not recorded
    task: Mapped[str]  # for example wikitext2, piqa
    task_version: Mapped[str]
    data_hash: Mapped[str]  # of the text, or of all prompts
    metric: Mapped[str]  # for example perplexity, accuracy
    direction: Mapped[str]  # which way is better: lower, higher
    status: Mapped[str]
    detail: Mapped[str]  # empty: the status is ok
    value: Mapped[float | None]  # null: not evaluated, see status
    standard_error: Mapped[float | None]  # null: not reported by the task
    n_items: Mapped[int] = mapped_column(BigInteger)  # tokens or questions evaluated
    seed: Mapped[int] = mapped_column(BigInteger)
    parameters: Mapped[dict[str, Any]] = mapped_column(JSON)  # of quantization and evaluation


class AccuracySample(Base):
    """Values of a metric per segment or question, in data order. No row: not reported."""

    __tablename__ = "accuracy_sample"

    accuracy_result_id: Mapped[int] = mapped_column(
        ForeignKey("accuracy_result.id"), primary_key=True
    )
    count: Mapped[int] = mapped_column(BigInteger)
    data: Mapped[bytes]  # zlib of little-endian float64


class ModelResult:
    """Mixin of the columns common to decode and serving results."""

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    created_at: Mapped[datetime]
    case: Mapped[str] = mapped_column("case_key")
    model: Mapped[str]
    weights: Mapped[str]  # synthetic: random values in the model's shapes
    scheme: Mapped[str]
    scheme_version: Mapped[int | None] = mapped_column(BigInteger)  # null: not recorded
    content_hash: Mapped[str | None]  # of the checkpoint; null: unknown
    kernels: Mapped[dict[str, Any]] = mapped_column(JSON)  # label by layer
    backend: Mapped[str]
    kv_bits: Mapped[int] = mapped_column(BigInteger)
    protocol_version: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str]
    detail: Mapped[str]  # empty: the status is ok
    weights_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: nothing was loaded
    steady_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: unknown (CPU)
    parameters: Mapped[dict[str, Any]] = mapped_column(JSON)  # of the scheme and the decode


class DecodeResult(ModelResult, Base):
    """One end-to-end decode of a model under a scheme."""

    __tablename__ = "decode_result"
    __table_args__ = (
        Index(None, "model", "scheme"),
        Index(None, "run_id"),
        Index(None, "content_hash"),
    )

    batch: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    new_tokens: Mapped[int] = mapped_column(BigInteger)
    prefill_ms: Mapped[float | None]  # null: not timed, see status
    token_ms: Mapped[float | None]  # median time of a decode step; null: as prefill_ms
    token_ci_low_ms: Mapped[float | None]  # null: as prefill_ms
    token_ci_high_ms: Mapped[float | None]  # null: as prefill_ms
    token_p95_ms: Mapped[float | None]  # null: as prefill_ms
    process_medians_ms: Mapped[list[float]] = mapped_column(JSON)
    tokens_per_s: Mapped[float | None]  # null: as prefill_ms
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: unknown (CPU)
    energy_j_per_token: Mapped[float | None]  # null: no energy counter
    parts: Mapped[list[Any]] = mapped_column(JSON)  # of a step; empty: no profiler


class DecodeSample(Base):
    """Measurements of a decode in one fresh process. No row: an older result."""

    __tablename__ = "decode_sample"

    decode_result_id: Mapped[int] = mapped_column(ForeignKey("decode_result.id"), primary_key=True)
    number: Mapped[int] = mapped_column(
        BigInteger, primary_key=True
    )  # index of the process, from 0
    gpu: Mapped[str]  # uuid of the device
    prefill_ms: Mapped[float]
    steady_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: unknown (CPU)
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: unknown (CPU)
    energy_j: Mapped[float | None]  # null: no energy counter
    count: Mapped[int] = mapped_column(BigInteger)  # steps
    data: Mapped[bytes]  # zlib of little-endian float64, ms of each step


class ServingResult(ModelResult, Base):
    """One serving run (continuous batching) of a model under a scheme."""

    __tablename__ = "serving_result"
    __table_args__ = (Index(None, "model", "scheme"), Index(None, "run_id"))

    batch_limit: Mapped[int] = mapped_column(BigInteger)
    memory_limit_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: no limit
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)  # of all requests
    new_tokens: Mapped[int] = mapped_column(BigInteger)  # of all requests
    lengths: Mapped[str]  # source of the requests' lengths
    tokens_per_s: Mapped[float | None]  # null: not served, see status
    latency_p50_s: Mapped[float | None]  # null: as tokens_per_s
    latency_p95_s: Mapped[float | None]  # null: as tokens_per_s
    latency_p99_s: Mapped[float | None]  # null: as tokens_per_s
    token_p50_ms: Mapped[float | None]  # null: as tokens_per_s
    token_p95_ms: Mapped[float | None]  # null: as tokens_per_s
    ttft_p50_ms: Mapped[float | None]  # null: as tokens_per_s, or older than this column
    ttft_p95_ms: Mapped[float | None]  # null: as ttft_p50_ms


class ReferenceValue(Base):
    """A number published in a paper; not measured here, not used by any gate."""

    __tablename__ = "reference_value"
    id: Mapped[int] = mapped_column(primary_key=True)
    fingerprint: Mapped[str] = mapped_column(unique=True)  # of all columns except value and note
    source: Mapped[str]  # the paper
    source_table: Mapped[str]  # table, figure or part of it
    kernel: Mapped[str]  # label of the kernel, or scheme of a whole model
    baseline: Mapped[str]  # denominator of a ratio, as kernel; empty: not a ratio
    model: Mapped[str]  # empty: all models of the source, or only a shape is given
    layer: Mapped[str]  # empty: all layers, or a whole model
    m: Mapped[int | None] = mapped_column(BigInteger)  # null: not a number of one GEMM
    n: Mapped[int | None] = mapped_column(BigInteger)  # null: over several shapes, or as m
    k: Mapped[int | None] = mapped_column(BigInteger)  # null: as n
    suite: Mapped[str]  # suite with these layers; empty: not about single layers
    metric: Mapped[str]
    task: Mapped[str]  # for example wikitext2; empty: no task
    value: Mapped[float]
    unit: Mapped[str]
    bound: Mapped[str]  # `up to`: the best case; `at most`: the worst; empty: mean or single value
    hardware: Mapped[str]  # empty: not given, or irrelevant
    note: Mapped[str]  # differences from measurements here; may be empty
