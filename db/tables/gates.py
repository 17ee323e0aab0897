"""Decisions of accuracy gates."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from flexq_bench.db.tables.base import Base


class AccuracyGate(Base):
    """One verdict on a scheme of a model under a policy."""

    __tablename__ = "accuracy_gate"
    __table_args__ = (Index(None, "model", "created_at"), Index(None, "run_id"))

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
    content_hash: Mapped[str | None]  # of the judged checkpoint; null: unknown
    through: Mapped[str]  # computation of the quantized layers: reference, kernels
    base: Mapped[str]  # scheme it is compared with
    reference: Mapped[str | None]  # reference model; null: the unquantized model itself
    reference_hash: Mapped[str | None]  # of its files or stored predictions; null: as reference
    policy: Mapped[str]
    policy_version: Mapped[int] = mapped_column(BigInteger)  # of the policy's file format
    policy_hash: Mapped[str]  # of the policy's content
    verdict: Mapped[str]  # the worst outcome of its limits
    exit_code: Mapped[int] = mapped_column(BigInteger)
    limits: Mapped[list[Any]] = mapped_column(JSON)  # of db.records.GateLimit
    diagnosis: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # of the loss; null: passed
