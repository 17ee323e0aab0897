"""Tables of series and epochs."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from flexq_bench.db.tables.base import Base


class Series(Base):
    """All that must be equal for two results to be comparable; hashed in identity_hash."""

    __tablename__ = "series"
    __table_args__ = (Index(None, "kernel", "gpu"), Index(None, "gpu"), Index(None, "project"))

    id: Mapped[int] = mapped_column(primary_key=True)
    identity_hash: Mapped[str] = mapped_column(unique=True)
    kernel: Mapped[str]
    kernel_version: Mapped[int] = mapped_column(BigInteger)
    variant: Mapped[str]  # empty: the plain kernel
    backend: Mapped[str]
    stage: Mapped[str]
    cache: Mapped[str]
    metric: Mapped[str]
    unit: Mapped[str]
    direction: Mapped[str]  # which way is better: lower, higher
    m: Mapped[int] = mapped_column(BigInteger)
    n: Mapped[int] = mapped_column(BigInteger)
    k: Mapped[int] = mapped_column(BigInteger)
    weight_bits: Mapped[int] = mapped_column(BigInteger)
    act_bits: Mapped[int] = mapped_column(BigInteger)
    group: Mapped[int | None] = mapped_column(BigInteger)  # null: one scale per row, or no scales
    input_distribution: Mapped[str]
    protocol_version: Mapped[int] = mapped_column(BigInteger)
    gpu: Mapped[str]  # SKU
    # Tool or repository of external results; empty: measured here, and not part of the identity.
    project: Mapped[str] = mapped_column(server_default="")


class Epoch(Base):
    """Part of a series under one environment: levels are compared only within an epoch."""

    __tablename__ = "epoch"
    __table_args__ = (UniqueConstraint("series_id", "environment_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    first_run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    opened_at: Mapped[datetime]  # time of its earliest measurement
