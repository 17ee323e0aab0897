"""Tables of measurements and of their raw samples; lists do not read the samples."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from flexq_bench.db.tables.base import Base


class Measurement(Base):
    """Summary of one measurement of a case. Times in microseconds."""

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
    # Index of the repetition of the case in the run, from 1. Null: not given.
    repetition: Mapped[int | None] = mapped_column(BigInteger)
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    epoch_id: Mapped[int] = mapped_column(ForeignKey("epoch.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    created_at: Mapped[datetime]

    model: Mapped[str]  # empty: not a model's shape
    layer: Mapped[str]  # empty: not a layer's shape

    status: Mapped[str]
    detail: Mapped[str]  # empty: the status is ok
    accepted: Mapped[bool]
    median_us: Mapped[float | None]  # null: not timed, see status
    ci_low_us: Mapped[float | None]  # null: as median_us
    ci_high_us: Mapped[float | None]  # null: as median_us
    n_samples: Mapped[int] = mapped_column(BigInteger)
    n_invalid: Mapped[int] = mapped_column(BigInteger)
    placement_medians_us: Mapped[list[float]] = mapped_column(JSON)  # empty: as median_us
    floor_us: Mapped[float | None]  # null: this shape's floor was not measured in the run
    pct_of_floor: Mapped[float | None]  # null: no time, or no floor
    launch_us: Mapped[float | None]  # null: the empty kernel was not measured in the run
    tops: Mapped[float | None]  # null: no time
    max_rel_error: Mapped[float | None]  # null: not compared, or the output was not finite
    exact: Mapped[bool | None]  # null: not compared, or the kernel has no integer part

    config: Mapped[dict[str, Any]] = mapped_column(JSON)  # empty: not configurable
    binary_hash: Mapped[str | None]  # null: not compiled here, or it did not run
    seed: Mapped[int] = mapped_column(BigInteger)
    # Device state. Null: not reported by the driver, or a CPU.
    sm_clock_mhz: Mapped[float | None]
    mem_clock_mhz: Mapped[float | None]
    power_w: Mapped[float | None]
    temperature_c: Mapped[float | None]
    throttle_mask: Mapped[int | None] = mapped_column(BigInteger)
    extra: Mapped[dict[str, Any]] = mapped_column(JSON)  # may be empty
    # Null in the next two: protocol 1, which had no regimes, or nothing ran.
    regime: Mapped[str | None]  # boost: free of the power limit; sustained: under steady load
    sample_gap_us: Mapped[float | None]  # idle time before each sample
    launch_j: Mapped[float | None]  # null: as regime, or not sustained, or not reported
    source_hash: Mapped[str | None]  # of a kernel from outside; null: a kernel of the commit


class Sample(Base):
    """Raw samples of a measurement in measurement order. No row: not timed, or pruned."""

    __tablename__ = "sample"

    measurement_id: Mapped[int] = mapped_column(ForeignKey("measurement.id"), primary_key=True)
    count: Mapped[int] = mapped_column(BigInteger)
    # Samples of each placement; their sum is `count`.
    placement_counts: Mapped[list[int]] = mapped_column(JSON)
    data: Mapped[bytes]  # zlib of little-endian float64, microseconds, concatenated by placement
