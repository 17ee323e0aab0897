"""A/A calibration: the noise of each series, and the rate of false alarms of the service."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from flexq_bench.db.tables.base import Base


class Noise(Base):
    """The noise of a series at one time. Sigmas are of ln(head / base) of the same commit."""

    __tablename__ = "noise"
    __table_args__ = (
        UniqueConstraint("series_id", "input_hash"),
        Index(None, "series_id", "computed_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    computed_at: Mapped[datetime]
    input_hash: Mapped[str]  # fingerprint of the decisions it was computed from
    comparisons: Mapped[int] = mapped_column(BigInteger)
    placements: Mapped[int] = mapped_column(BigInteger)
    blocks: Mapped[int] = mapped_column(BigInteger)
    block_sigma: Mapped[float | None]  # null: never two blocks in a placement
    placement_sigma: Mapped[float | None]  # null: never two placements
    comparison_sigma: Mapped[float | None]  # null: a single comparison
    estimate_sigma: Mapped[float]  # of the estimate of one comparison
    noise_floor: Mapped[float | None]  # null: too few comparisons
    smallest_step: Mapped[float | None]  # null: as noise_floor


class FalseAlarmRate(Base):
    """Rate at which a commit compared with itself was judged slower or faster."""

    __tablename__ = "false_alarm_rate"
    __table_args__ = (UniqueConstraint("input_hash"), Index(None, "until"))

    id: Mapped[int] = mapped_column(primary_key=True)
    since: Mapped[datetime]  # of the first comparison counted
    until: Mapped[datetime]  # of the last
    input_hash: Mapped[str]  # fingerprint of the decisions counted
    canaries: Mapped[int] = mapped_column(BigInteger)
    alarms: Mapped[int] = mapped_column(BigInteger)
    rate: Mapped[float]  # alarms per canary
    low: Mapped[float]  # bounds of the interval at `confidence`
    high: Mapped[float]
    confidence: Mapped[float]
