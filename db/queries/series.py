"""Questions about series: which there are, and their history by ancestry."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.queries.filters import Filters
from db.tables import Commit, Measurement, Run, Series


@dataclass(frozen=True, slots=True)
class SeriesRow:
    """A series: what is equal in all its numbers, and how many there are."""

    id: int
    kernel: str
    kernel_version: int
    variant: str
    backend: str
    stage: str
    cache: str
    metric: str
    unit: str
    direction: str
    m: int
    n: int
    k: int
    weight_bits: int
    act_bits: int
    group: int | None
    input_distribution: str
    protocol_version: int
    gpu: str
    measurements: int


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One accepted result of a series. epoch: points of one epoch share their environment."""

    commit: str  # sha
    topo_order: int | None  # None: not in a git tree
    epoch: int
    run: str  # uuid
    measurement: str  # uuid
    created_at: datetime
    median_us: float
    ci_low_us: float | None
    ci_high_us: float | None
    floor_us: float | None


@dataclass(frozen=True, slots=True)
class FilterValues:
    """What a filter can be set to, sorted; models and layers without the empty label."""

    suites: tuple[str, ...]
    kernels: tuple[str, ...]
    gpus: tuple[str, ...]
    models: tuple[str, ...]
    layers: tuple[str, ...]
    stages: tuple[str, ...]
    caches: tuple[str, ...]
    statuses: tuple[str, ...]
    m: tuple[int, ...]


def list_series(session: Session, filters: Filters | None = None) -> list[SeriesRow]:
    """The series with a measurement that passes, ordered by kernel, GPU, shape; counts of those."""
    wanted = filters or Filters()
    counted = select(Measurement.series_id, func.count().label("measurements")).group_by(
        Measurement.series_id
    )
    on_measurement = wanted.on_measurement()
    if on_measurement:
        counted = counted.join(Run, Measurement.run_id == Run.id).where(*on_measurement)
    counts = counted.subquery()
    columns = [c for c in Series.__table__.columns if c.name != "identity_hash"]
    query = (
        select(*columns, counts.c.measurements)
        .join(counts, counts.c.series_id == Series.id)
        .where(*wanted.on_series())
        .order_by(
            Series.kernel, Series.variant, Series.gpu, Series.n, Series.k, Series.m, Series.id
        )
    )
    return [SeriesRow(**row) for row in session.execute(query).mappings()]


def series_history(session: Session, series_id: int) -> list[HistoryPoint]:
    """Accepted medians of a series, oldest commit first (ancestry, not clock).

    Results of one commit stand in the order measured; commits outside of a git tree come last.
    """
    query = (
        select(
            Commit.sha.label("commit"),
            Commit.topo_order,
            Measurement.epoch_id.label("epoch"),
            Run.uuid.label("run"),
            Measurement.uuid.label("measurement"),
            Measurement.created_at,
            Measurement.median_us,
            Measurement.ci_low_us,
            Measurement.ci_high_us,
            Measurement.floor_us,
        )
        .select_from(Measurement)
        .join(Commit, Measurement.commit_id == Commit.id)
        .join(Run, Measurement.run_id == Run.id)
        .where(
            Measurement.series_id == series_id,
            Measurement.accepted,
            Measurement.median_us.is_not(None),
        )
        .order_by(Commit.topo_order.nulls_last(), Measurement.created_at, Measurement.uuid)
    )
    return [HistoryPoint(**row) for row in session.execute(query).mappings()]


def kernel_names(session: Session) -> tuple[str, ...]:
    """Every kernel that was ever measured, without variants, sorted."""
    return tuple(sorted(session.scalars(select(Series.kernel).distinct())))


def filter_values(session: Session) -> FilterValues:
    """Every value that occurs, for the choices of a page or a message."""

    def distinct(column: Any) -> tuple[Any, ...]:
        found = session.scalars(select(column).distinct()).all()
        return tuple(sorted(value for value in found if value != ""))

    return FilterValues(
        suites=distinct(Run.suite),
        kernels=distinct(Series.kernel),
        gpus=distinct(Series.gpu),
        models=distinct(Measurement.model),
        layers=distinct(Measurement.layer),
        stages=distinct(Series.stage),
        caches=distinct(Series.cache),
        statuses=distinct(Measurement.status),
        m=distinct(Series.m),
    )
