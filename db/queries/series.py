"""Questions about series: which there are, and their history by ancestry."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.decisions import OPEN_STATES
from db.queries.filters import Filters
from db.records import TIME_METRICS
from db.tables import Alert, Commit, Decision, EpochBreak, Measurement, Run, Series

OUTSIDE = "outside"  # backend of what another tool measured
TRAIL = 5  # nights in which a step of 2 % is found (docs/statistics.md)


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
    project: str
    measurements: int


@dataclass(frozen=True, slots=True)
class SeriesName:
    """Fields that identify a series to people."""

    id: int
    kernel: str
    kernel_version: int
    variant: str
    backend: str
    stage: str
    cache: str
    metric: str
    unit: str
    m: int
    n: int
    k: int
    protocol_version: int
    gpu: str
    project: str


@dataclass(frozen=True, slots=True)
class ProjectSeries:
    """A series of a project that another tool measured: what its verdicts need to know of it."""

    id: int
    project: str
    kernel: str
    backend: str
    direction: str
    gpu: str


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One accepted result of a series.

    epoch: counts from 1 in the order of the history; points of one epoch share their environment
    and lie on the same side of every acknowledged change.
    """

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
    sm_clock_mhz: float | None
    subject: str = ""  # of the commit; empty: not known


@dataclass(frozen=True, slots=True)
class FilterValues:
    """Options of each filter, sorted; models and layers without the empty label."""

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


def series_names(session: Session) -> list[SeriesName]:
    """Every series, ordered by kernel, GPU, shape. It reads no measurement."""
    query = select(*(Series.__table__.columns[field.name] for field in fields(SeriesName)))
    ordered = query.order_by(
        Series.kernel, Series.variant, Series.gpu, Series.n, Series.k, Series.m, Series.id
    )
    return [SeriesName(**row) for row in session.execute(ordered).mappings()]


def project_series(session: Session) -> list[ProjectSeries]:
    """Every series that another tool measured, by its id. It reads no measurement."""
    columns = (Series.__table__.columns[field.name] for field in fields(ProjectSeries))
    query = (
        select(*columns).where(Series.project != "", Series.backend == OUTSIDE).order_by(Series.id)
    )
    return [ProjectSeries(*row) for row in session.execute(query)]


def main_project(session: Session) -> str:
    """The project whose times pages set beside each other: this repository's, the empty name; where
    nothing of it was timed, the first by name that was timed here. It reads no measurement."""
    query = (
        select(func.min(Series.project))
        .where(Series.metric.in_(TIME_METRICS.values()))
        .where(Series.backend != OUTSIDE)
    )
    return session.scalar(query) or ""


def series_history(
    session: Session, series_id: int, *, without_sweeps: bool = False
) -> list[HistoryPoint]:
    """Accepted medians of a series, oldest commit first (ancestry, not clock).

    without_sweeps: leave out what somebody measured once to know it: it is never a baseline.

    Results of one commit stand in the order measured; commits outside of a git tree come last.
    """
    query = (
        select(*history_columns())
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
    if without_sweeps:
        query = query.where(Run.trigger != "sweep")
    breaks = explained_orders(session, [series_id]).get(series_id, ())
    return points_of(session.execute(query), breaks)


def history_columns() -> tuple[Any, ...]:
    """A HistoryPoint's fields of each measurement, joined with its commit and run, with epoch_id
    in the place of the epoch: what `points_of` takes."""
    return (
        Commit.sha.label("commit"),
        Commit.topo_order,
        Measurement.epoch_id,
        Run.uuid.label("run"),
        Measurement.uuid.label("measurement"),
        Measurement.created_at,
        Measurement.median_us,
        Measurement.ci_low_us,
        Measurement.ci_high_us,
        Measurement.floor_us,
        Measurement.sm_clock_mhz,
        Commit.subject,
    )


def points_of(rows: Iterable[Sequence[Any]], breaks: Sequence[int]) -> list[HistoryPoint]:
    """Rows of one series, in their order, with their epochs.

    rows: values of `history_columns`, by place: pages read 15,000 of them at once, and making each
    a mapping first took half of that time. breaks: places in the ancestry at which an acknowledged
    change opens an epoch.
    """
    numbers: dict[tuple[int, int], int] = {}
    points = []
    for commit, order, epoch_id, *others in rows:
        passed = 0 if order is None else bisect_right(breaks, order)
        epoch = numbers.setdefault((epoch_id, passed), len(numbers) + 1)
        points.append(HistoryPoint(commit, order, epoch, *others))
    return points


def trusted_base(session: Session, series_id: int, *, trail: int = TRAIL) -> str | None:
    """The commit that tonight's result of a series is compared with; None: there is none yet.

    The newest of its newest epoch that is `trail` commits older than its latest and not newer than
    the last good commit of any open alert about the series. It trails, since a step that was not
    confirmed in its first night would otherwise become the base of the second (docs/statistics.md).
    """
    points = series_history(session, series_id, without_sweeps=True)
    if not points:
        return None
    shas = list(dict.fromkeys(p.commit for p in points if p.epoch == points[-1].epoch))
    trusted = shas[: max(len(shas) - trail, 1)]
    orders = {p.commit: p.topo_order for p in points}
    limit = session.scalar(
        select(func.min(Commit.topo_order))
        .join(Alert, Alert.good_commit_id == Commit.id)
        .join(Decision, Decision.alert_id == Alert.id)
        .where(Decision.series_id == series_id, Alert.state.in_(OPEN_STATES))
    )
    if limit is not None:
        trusted = [sha for sha in trusted if (orders[sha] or 0) <= limit]
    return trusted[-1] if trusted else None


def explained_orders(session: Session, series_ids: Sequence[int]) -> dict[int, list[int]]:
    """By series the places in the ancestry where an explained change opens an epoch of it."""
    query = (
        select(EpochBreak.series_id, Commit.topo_order)
        .join(Commit, EpochBreak.commit_id == Commit.id)
        .where(EpochBreak.series_id.in_(series_ids), Commit.topo_order.is_not(None))
        .order_by(Commit.topo_order)
    )
    orders: dict[int, list[int]] = {}
    for series, order in session.execute(query):
        if order is not None:
            orders.setdefault(series, []).append(order)
    return orders


def kernel_names(session: Session) -> tuple[str, ...]:
    """Every kernel that was ever measured, without variants, sorted."""
    return tuple(sorted(session.scalars(select(Series.kernel).distinct())))


def filter_values(session: Session) -> FilterValues:
    """Every value that occurs, for the choices of a page or a message."""

    def distinct(column: Any) -> tuple[Any, ...]:
        values = session.scalars(select(column).distinct()).all()
        return tuple(sorted(value for value in values if value != ""))

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
