"""Decisions of accuracy gates."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from db.tables.base import Base


class AccuracyGate(Base):
    """One scheme of a model held against a policy once."""

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
    content_hash: Mapped[str | None]  # of the checkpoint that was judged; null: not known
    through: Mapped[str]  # what computed its quantized layers: reference, kernels
    base: Mapped[str]  # the scheme that it was compared with
    reference: Mapped[str | None]  # the model that all was compared with; null: the model itself
    reference_hash: Mapped[str | None]  # of its files, or of the stored reference; null: as above
    policy: Mapped[str]
    policy_version: Mapped[int] = mapped_column(BigInteger)  # of the form of its file
    policy_hash: Mapped[str]  # of what its file said
    verdict: Mapped[str]  # the worst outcome of its limits
    exit_code: Mapped[int] = mapped_column(BigInteger)
    limits: Mapped[list[Any]] = mapped_column(JSON)  # each as db.gate_records.GateLimit
    diagnosis: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # where it lost; null: passed
