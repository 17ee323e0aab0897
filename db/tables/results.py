"""What is measured of whole models, and what the papers published."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from db.tables.base import Base


class AccuracyResult(Base):
    """One metric of one task of a model under a scheme."""

    __tablename__ = "accuracy_result"
    __table_args__ = (Index(None, "model", "scheme", "task"), Index(None, "run_id"))

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
    task: Mapped[str]  # for example wikitext2, piqa
    task_version: Mapped[str]
    data_hash: Mapped[str]  # of the text, or of every question as it was asked
    metric: Mapped[str]  # for example perplexity, accuracy
    direction: Mapped[str]  # which way is better: lower, higher
    status: Mapped[str]
    detail: Mapped[str]  # empty: the status is ok
    value: Mapped[float | None]  # null: not evaluated, the status says why
    standard_error: Mapped[float | None]  # null: the task gives none
    n_items: Mapped[int] = mapped_column(BigInteger)  # tokens or questions evaluated
    seed: Mapped[int] = mapped_column(BigInteger)
    parameters: Mapped[dict[str, Any]] = mapped_column(JSON)  # of quantization and evaluation


class AccuracySample(Base):
    """A metric by segment or question, in the data's order. No row: there is no such thing."""

    __tablename__ = "accuracy_sample"

    accuracy_result_id: Mapped[int] = mapped_column(
        ForeignKey("accuracy_result.id"), primary_key=True
    )
    count: Mapped[int] = mapped_column(BigInteger)
    data: Mapped[bytes]  # zlib of little-endian float64


class DecodeResult(Base):
    """One end-to-end decode of a model under a scheme."""

    __tablename__ = "decode_result"
    __table_args__ = (Index(None, "model", "scheme"), Index(None, "run_id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    created_at: Mapped[datetime]
    model: Mapped[str]
    scheme: Mapped[str]
    batch: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    new_tokens: Mapped[int] = mapped_column(BigInteger)
    protocol_version: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str]
    detail: Mapped[str]  # empty: the status is ok
    prefill_ms: Mapped[float | None]  # null: never timed, the status says why
    token_ms: Mapped[float | None]  # median time of a decode step; null: as prefill_ms
    token_ci_low_ms: Mapped[float | None]  # null: as prefill_ms
    token_ci_high_ms: Mapped[float | None]  # null: as prefill_ms
    tokens_per_s: Mapped[float | None]  # null: as prefill_ms
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: not known (CPU)
    parameters: Mapped[dict[str, Any]] = mapped_column(JSON)  # of the scheme and the decode


class ReferenceValue(Base):
    """A number that a paper published: never measured here, never compared by a gate."""

    __tablename__ = "reference_value"
    id: Mapped[int] = mapped_column(primary_key=True)
    fingerprint: Mapped[str] = mapped_column(unique=True)  # of all the columns but value and note
    source: Mapped[str]  # the paper and its version
    source_table: Mapped[str]  # table or figure in it
    kernel: Mapped[str]
    model: Mapped[str]  # empty: given for a shape alone
    layer: Mapped[str]  # empty: given for a shape or a whole model
    m: Mapped[int | None] = mapped_column(BigInteger)  # null: not a number of one GEMM
    n: Mapped[int | None] = mapped_column(BigInteger)  # null: as m
    k: Mapped[int | None] = mapped_column(BigInteger)  # null: as m
    metric: Mapped[str]
    value: Mapped[float]
    unit: Mapped[str]
    hardware: Mapped[str]
    note: Mapped[str]  # empty: nothing to add
