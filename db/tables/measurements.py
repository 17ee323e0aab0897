"""Measurements, and their raw samples in a table that no listing touches."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from db.tables.base import Base


class Measurement(Base):
    """The summary of one case measured once. Times in microseconds."""

    __tablename__ = "measurement"
    __table_args__ = (
        Index(None, "series_id", "commit_id"),
        Index(None, "series_id", "created_at"),
        Index(None, "run_id", "case_key", "created_at"),
        Index(None, "run_id", "case_key", "repetition", unique=True),
        Index(None, "status", "created_at"),
        Index(None, "created_at"),
        Index(None, "model", "layer"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    case_key: Mapped[str]
    # Which of those that the run wants of the case, from 1. Null: it does not say.
    repetition: Mapped[int | None] = mapped_column(BigInteger)
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    epoch_id: Mapped[int] = mapped_column(ForeignKey("epoch.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    created_at: Mapped[datetime]

    model: Mapped[str]  # empty: the shape belongs to no model
    layer: Mapped[str]  # empty: the shape belongs to no layer

    status: Mapped[str]
    detail: Mapped[str]  # empty: the status is ok
    accepted: Mapped[bool]
    median_us: Mapped[float | None]  # null: never timed, the status says why
    ci_low_us: Mapped[float | None]  # null: as median_us
    ci_high_us: Mapped[float | None]  # null: as median_us
    n_samples: Mapped[int] = mapped_column(BigInteger)
    n_invalid: Mapped[int] = mapped_column(BigInteger)
    placement_medians_us: Mapped[list[float]] = mapped_column(JSON)  # empty: as median_us
    floor_us: Mapped[float | None]  # null: this shape's floor was not measured in the run
    pct_of_floor: Mapped[float | None]  # null: no median, or no floor
    launch_us: Mapped[float | None]  # null: the empty kernel was not measured in the run
    tops: Mapped[float | None]  # null: no median
    max_rel_error: Mapped[float | None]  # null: not compared, or the output was not finite
    exact: Mapped[bool | None]  # null: not compared, or the kernel has no integer part

    config: Mapped[dict[str, Any]] = mapped_column(JSON)  # empty: the kernel has nothing to choose
    binary_hash: Mapped[str | None]  # null: not our machine code, or it never ran
    seed: Mapped[int] = mapped_column(BigInteger)
    # Null in every column of the device's state: the driver did not tell, or it is a CPU.
    sm_clock_mhz: Mapped[float | None]
    mem_clock_mhz: Mapped[float | None]
    power_w: Mapped[float | None]
    temperature_c: Mapped[float | None]
    throttle_mask: Mapped[int | None] = mapped_column(BigInteger)
    extra: Mapped[dict[str, Any]] = mapped_column(JSON)  # empty: nothing beyond the columns
    # Null in the next two: measured by protocol 1, which named no regime, or nothing ran.
    regime: Mapped[str | None]  # boost: free of the power limit; sustained: under steady load
    sample_gap_us: Mapped[float | None]  # idle time before each sample
    launch_j: Mapped[float | None]  # null: as regime, or not sustained, or the driver did not tell
    source_hash: Mapped[str | None]  # of a kernel from outside; null: one of the commit's own


class Sample(Base):
    """Raw samples of a measurement in the order measured. No row: never timed, or pruned."""

    __tablename__ = "sample"

    measurement_id: Mapped[int] = mapped_column(ForeignKey("measurement.id"), primary_key=True)
    count: Mapped[int] = mapped_column(BigInteger)
    # Samples of each placement; their sum is `count`.
    placement_counts: Mapped[list[int]] = mapped_column(JSON)
    data: Mapped[bytes]  # zlib of little-endian float64, microseconds, placement after placement
