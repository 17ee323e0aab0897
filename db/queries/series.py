"""Queries for series, and their history in order of ancestry."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session, aliased

from flexq_bench.db.decisions import OPEN_STATES
from flexq_bench.db.identity import fingerprint
from flexq_bench.db.queries.filters import SERIES_ORDER, Filters
from flexq_bench.db.queries.lines import MAIN_LINE, Line, is_on_main, line_of
from flexq_bench.db.queries.pages import Listing, Page, count_of
from flexq_bench.db.queries.results import SWEEP
from flexq_bench.db.queries.rows import columns_of, rows_of
from flexq_bench.db.records import EXTERNAL_BACKEND, TIME_METRICS
from flexq_bench.db.tables import (
    Alert,
    BranchCommit,
    Commit,
    Decision,
    Environment,
    Epoch,
    EpochBreak,
    Measurement,
    Noise,
    Run,
    Series,
)

BASE_LAG_COMMITS = 5  # nightly runs within which a step of 2 % is detected (docs/statistics.md)


@dataclass(frozen=True, slots=True)
class SeriesRow:
    """A series: its identity, and its number of measurements."""

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
    operation: str
    parameters: str
    m: int | None
    n: int | None
    k: int | None
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
    operation: str
    parameters: str
    m: int | None
    n: int | None
    k: int | None
    protocol_version: int
    gpu: str
    project: str
    direction: str = "lower"


@dataclass(frozen=True, slots=True)
class ProjectSeries:
    """A series measured by another tool: the fields that its verdicts need."""

    id: int
    project: str
    kernel: str
    backend: str
    metric: str
    unit: str
    direction: str
    gpu: str


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One accepted result of a series.

    epoch: counts from 1 in the order of the history; the points of an epoch have the same
    environment, whatever the host, and no acknowledged change between them. device: id of the
    device with its settings.
    """

    commit: str  # sha
    topo_order: int | None  # place on its line, in order of ancestry (db.lines); None: on none
    epoch: int
    run: str  # uuid
    measurement: str  # uuid
    created_at: datetime
    median_us: float
    ci_low_us: float | None
    ci_high_us: float | None
    floor_us: float | None
    sm_clock_mhz: float | None
    subject: str = ""  # of the commit; empty: unknown
    device: int = 0
    reruns: tuple[float, ...] = ()  # results that the point combines; empty: it is one result


@dataclass(slots=True)
class TimedPoint:
    """Fields of a HistoryPoint that triggers need: a night reads those of all results."""

    commit: str
    topo_order: int | None
    epoch: int
    id: int  # of the measurement
    median_us: float
    device: int = 0
    reruns: tuple[float, ...] = ()


Point = TypeVar("Point", HistoryPoint, TimedPoint)


@dataclass(frozen=True, slots=True)
class FilterValues:
    """Options of each filter, sorted, without the empty name."""

    suites: tuple[str, ...]
    kernels: tuple[str, ...]
    gpus: tuple[str, ...]
    models: tuple[str, ...]
    layers: tuple[str, ...]
    stages: tuple[str, ...]
    caches: tuple[str, ...]
    statuses: tuple[str, ...]
    operations: tuple[str, ...]
    m: tuple[int, ...]
    projects: tuple[str, ...]


def list_series(session: Session, filters: Filters | None = None) -> list[SeriesRow]:
    """Return series with their number of matching measurements, ordered by kernel, GPU, shape."""
    filters = filters or Filters()
    counted = select(Measurement.series_id, func.count().label("measurements")).group_by(
        Measurement.series_id
    )
    on_measurement = filters.on_measurement()
    if on_measurement:
        counted = counted.join(Run, Measurement.run_id == Run.id).where(*on_measurement)
    counts = counted.subquery()
    query = (
        select(*columns_of(SeriesRow, Series, measurements=counts.c.measurements))
        .join(counts, counts.c.series_id == Series.id)
        .where(*filters.on_series())
        .order_by(*SERIES_ORDER)
    )
    return rows_of(session, SeriesRow, query)


def series_names(session: Session) -> list[SeriesName]:
    """Return all series, ordered by kernel, GPU, shape. Reads no measurement."""
    query = select(*columns_of(SeriesName, Series)).order_by(*SERIES_ORDER)
    return rows_of(session, SeriesName, query)


_BY_ID = Listing(Series.id, (Series.id,), (False,))


def series_page(session: Session, filters: Filters, page: Page) -> tuple[list[SeriesName], int]:
    """Return a page of the series by id, and the number of all. filters: those on series."""
    query = select(*columns_of(SeriesName, Series)).where(*filters.on_series())
    rows = rows_of(session, SeriesName, _BY_ID.page(session, query, page))
    return rows, count_of(session, query)


def series_name(session: Session, series_id: int) -> SeriesName | None:
    """Return a series; None: it is not stored."""
    query = select(*columns_of(SeriesName, Series)).where(Series.id == series_id)
    return next(iter(rows_of(session, SeriesName, query)), None)


_TEXTS = {
    "kernel": Series.kernel,
    "variant": Series.variant,
    "gpu": Series.gpu,
    "stage": Series.stage,
    "operation": Series.operation,
    "parameters": Series.parameters,
    "metric": Series.metric,
    "project": Series.project,
    "suite": Run.suite,
    "status": Run.status,
}


def stored_texts(session: Session, name: str) -> tuple[str, ...]:
    """Return all values of a field of series or runs, to find those that a pattern matches."""
    return tuple(session.scalars(select(_TEXTS[name]).distinct()))


def project_series(
    session: Session, series_ids: Iterable[int] | None = None
) -> list[ProjectSeries]:
    """Return the series measured by another tool, of these ids, by id. Reads no measurement."""
    query = (
        select(*columns_of(ProjectSeries, Series))
        .where(Series.project != "", Series.backend == EXTERNAL_BACKEND)
        .order_by(Series.id)
    )
    if series_ids is None:
        return rows_of(session, ProjectSeries, query)
    ids = sorted(set(series_ids))
    return [
        row
        for start in range(0, len(ids), _BATCH)  # a server takes 65,535 parameters at most
        for row in rows_of(
            session, ProjectSeries, query.where(Series.id.in_(ids[start : start + _BATCH]))
        )
    ]


def series_of_other_units(session: Session, series_ids: Iterable[int]) -> list[tuple[int, int]]:
    """Return pairs of ids: a given series of another tool, and one of the same benchmark.

    The two differ only in their unit, which can't be converted, or in which direction is better.
    """
    other = aliased(Series)
    names = [
        column.name
        for column in Series.__table__.columns
        if column.name not in ("id", "identity_hash", "unit", "direction")
    ]
    same = [getattr(Series, name).is_not_distinct_from(getattr(other, name)) for name in names]
    query = (
        select(Series.id, other.id)
        .where(Series.id.in_(list(series_ids)), Series.backend == EXTERNAL_BACKEND)
        .where(other.id != Series.id, *same)
        .order_by(Series.id, other.id)
    )
    return [(one, another) for one, another in session.execute(query)]


def main_project(session: Session) -> str:
    """Return the project whose times pages compare: "", this repository, if it has timed series.

    Otherwise the first project by name that was timed here. Reads no measurement.
    """
    query = (
        select(func.min(Series.project))
        .where(Series.metric.in_(TIME_METRICS.values()))
        .where(Series.backend != EXTERNAL_BACKEND)
    )
    return session.scalar(query) or ""


def project_names(session: Session) -> list[str]:
    """Return the projects with series, sorted; "" is this repository. Reads no measurement."""
    return list(session.scalars(select(Series.project).distinct().order_by(Series.project)))


def measured_series(session: Session, series_ids: Sequence[int]) -> bool:
    """Return True if a run measured one of these series; others were only compared."""
    of_series = select(Measurement.id).where(Measurement.series_id.in_(list(series_ids)))
    return bool(session.scalar(select(of_series.exists())))


def series_history(
    session: Session, series_id: int, *, without_sweeps: bool = False, branch: str | None = None
) -> list[HistoryPoint]:
    """Return accepted times of a series on a line of history, oldest commit first.

    without_sweeps: exclude one-off sweeps, which are never a baseline. branch None: the main line;
    else the main line up to the fork, and the branch's own commits. Results of one commit are in
    measurement order.
    """
    histories = series_histories(session, [series_id], without_sweeps=without_sweeps, branch=branch)
    return histories.get(series_id, [])


def newest_histories(
    session: Session, series_ids: Iterable[int], *, commits: int, until: int | None = None
) -> dict[int, list[HistoryPoint]]:
    """Return `series_histories` without sweeps of the main line: at least so many newest commits.

    Of each series up to twice as many, and no older results: the cost does not grow with a history.
    until: place on the line up to which so many are read; what came later is read, too.
    """
    return _newest(session, series_ids, _whole, commits, until)


def series_histories(
    session: Session,
    series_ids: Iterable[int],
    *,
    without_sweeps: bool = False,
    branch: str | None = None,
) -> dict[int, list[HistoryPoint]]:
    """Return `series_history` of each series; those without a result are left out.

    branch: of the project of these series.
    """
    conditions = [Run.trigger != SWEEP] if without_sweeps else []
    return _on_line(session, series_ids, branch, HistoryPoint, *conditions)


def timed_histories(
    session: Session,
    series_ids: Iterable[int],
    *,
    until: int | None = None,
    branch: str | None = None,
) -> dict[int, list[TimedPoint]]:
    """Return `newest_histories` of so many commits as triggers need; of a branch, all results.

    Triggers compare with the newest 30 results of an environment.
    """
    if branch is not None:
        return _on_line(session, series_ids, branch, TimedPoint, Run.trigger != SWEEP)
    histories = _newest(session, series_ids, _timed, _TIMED_COMMITS, until)
    mixed = [
        series
        for series, points in histories.items()
        if len(points) >= _TIMED_COMMITS
        and sum(point.epoch == points[-1].epoch for point in points) <= _TIMED_COMMITS // 2
    ]
    return histories | _newest(session, mixed, _timed, 5 * _TIMED_COMMITS, until)


def first_time(session: Session, points: Sequence[TimedPoint]) -> datetime | None:
    """Return the time of the earliest of these results; None: there is none."""
    times = [
        session.scalar(
            select(func.min(Measurement.created_at)).where(
                Measurement.id.in_([point.id for point in points[start : start + _BATCH]])
            )
        )
        for start in range(0, len(points), _BATCH)
    ]
    return min((time for time in times if time is not None), default=None)


def _newest(
    session: Session,
    series_ids: Iterable[int],
    read: Callable[[Session, Sequence[int], Sequence[ColumnElement[bool]]], dict[int, list[Point]]],
    commits: int,
    until: int | None,
) -> dict[int, list[Point]]:
    by_place: dict[int, list[int]] = defaultdict(list)
    ids = sorted(set(series_ids))
    newest = select(Commit.position).where(Commit.position.is_not(None))
    if session.scalar(newest.order_by(Commit.position.desc()).offset(commits).limit(1)) is None:
        by_place[0] = ids  # all are among the newest
        ids = []
    for start in range(0, len(ids), _BATCH):
        query = select(Series.id, _place_of_newest(commits, until))
        for series, place in session.execute(
            query.where(Series.id.in_(ids[start : start + _BATCH]))
        ):
            by_place[place // commits * commits].append(series)  # few statements for all series
    histories: dict[int, list[Point]] = {}
    for place, own in by_place.items():
        later = select(Commit.id).where(Commit.position >= place)
        conditions = [Measurement.commit_id.in_(later)] if place else []
        for start in range(0, len(own), _BATCH):
            histories |= read(session, own[start : start + _BATCH], conditions)
    return histories


def _whole(
    session: Session, series_ids: Sequence[int], conditions: Sequence[ColumnElement[bool]]
) -> dict[int, list[HistoryPoint]]:
    is_counted = Run.trigger != SWEEP
    return _histories(session, series_ids, MAIN_LINE, HistoryPoint, is_counted, *conditions)


def _timed(
    session: Session, series_ids: Sequence[int], conditions: Sequence[ColumnElement[bool]]
) -> dict[int, list[TimedPoint]]:
    """Return what `_histories` returns of the main line, without sweeps, in less time.

    Each result is read without its commit and run, of which there are far fewer.
    """
    sweeps = select(Run.id).where(Run.trigger == SWEEP)
    query = (
        select(
            *(Measurement.series_id, Measurement.commit_id, Measurement.epoch_id),
            *(Measurement.id, Measurement.median_us, Measurement.device_id),
        )
        .where(
            Measurement.series_id.in_(series_ids),
            Measurement.accepted,
            Measurement.median_us.is_not(None),
            Measurement.run_id.not_in(sweeps),
            *conditions,
        )
        .order_by(Measurement.series_id, Measurement.created_at, Measurement.id)  # as the index
    )
    rows: Sequence[Any] = session.connection().execute(query).all()
    placed = select(Commit.id, Commit.sha, Commit.position).where(Commit.position.is_not(None))
    ids = sorted({row[1] for row in rows})
    shas: dict[int, str] = {}
    places: dict[int, int] = {}
    for start in range(0, len(ids), _BATCH):
        batch = placed.where(Commit.id.in_(ids[start : start + _BATCH]))
        for commit, sha, place in session.execute(batch):
            shas[commit], places[commit] = sha, int(place or 0)
    breaks = explained_orders(session, series_ids)
    environments = epoch_environments(session, series_ids)
    histories = {}
    for series, group in groupby(rows, key=itemgetter(0)):
        own = list(group)
        order = [places.get(row[1], -1) for row in own]
        if order[0] < 0 or order != sorted(order):
            own = sorted((row for row in own if row[1] in places), key=lambda row: places[row[1]])
            order = [places[row[1]] for row in own]
        if not own:
            continue
        # In columns: a night has thousands of rows.
        _, ats, epochs, *values = zip(*own, strict=True)
        passed = breaks.get(series, ())
        numbers: dict[object, int] = {}
        keys: Iterable[object] = map(environments.__getitem__, epochs)
        if passed:
            keys = zip(keys, (bisect_right(passed, place) for place in order), strict=True)
        numbered = [numbers.setdefault(key, len(numbers) + 1) for key in keys]
        commits = map(shas.__getitem__, ats)
        histories[series] = list(map(TimedPoint, commits, order, numbered, *values))
    return histories


def _on_line(
    session: Session,
    series_ids: Iterable[int],
    branch: str | None,
    point: type[Point],
    *conditions: ColumnElement[bool],
) -> dict[int, list[Point]]:
    ids = sorted(set(series_ids))
    if not ids:
        return {}
    line = line_of(session, ids[0], branch)
    return _in_batches(ids, lambda batch: _histories(session, batch, line, point, *conditions))


def history_columns(
    position: ColumnElement[Any] | None = None, point: type[Any] = HistoryPoint
) -> list[Any]:
    """Return the columns of the rows of `points_of`: the point's, with the id of the epoch.

    The query must join Commit and Run. position: of the commit; None: on the main line.
    """
    return columns_of(
        *(point, Commit, Measurement),
        commit=Commit.sha,
        topo_order=Commit.position if position is None else position,
        epoch=Measurement.epoch_id,
        run=Run.uuid,
        measurement=Measurement.uuid,
        device=Measurement.device_id,
        id=Measurement.id,
    )


def points_of(
    rows: Iterable[Sequence[Any]],
    breaks: Sequence[int],
    environments: Mapping[int, str],
    point: type[Point] = HistoryPoint,  # type: ignore[assignment]
) -> list[Point]:
    """Convert rows of one series to points, and number their epochs.

    rows: tuples of the series and of values in the order of `history_columns`; converting the
    15,000 rows of a page to mappings would take half of its time. breaks: topo_order of the commits
    at which an acknowledged change opens an epoch. environments: result of `epoch_environments`.
    """
    numbers: dict[tuple[str, int], int] = {}
    known: dict[tuple[int, int], int] = {}
    points = []
    for _, commit, order, epoch_id, *values in rows:
        passed = bisect_right(breaks, order) if breaks and order is not None else 0
        epoch = known.get((epoch_id, passed))
        if epoch is None:
            epoch = numbers.setdefault((environments[epoch_id], passed), len(numbers) + 1)
            known[epoch_id, passed] = epoch
        points.append(point(commit, order, epoch, *values))
    return points


def epoch_environments(session: Session, series_ids: Sequence[int]) -> dict[int, str]:
    """Return a hash of the environment of each stored epoch of these series, without its host.

    A container has a new host name each time, so an epoch that included it would never have a
    second result. Other properties of a host are stored with its device.
    """
    query = select(Epoch.id, Epoch.environment_id).where(Epoch.series_id.in_(series_ids))
    of_epoch = {row.id: row.environment_id for row in session.execute(query)}
    contents = select(Environment.id, Environment.content).where(
        Environment.id.in_(set(of_epoch.values()))
    )
    hashes = {
        row.id: fingerprint({name: value for name, value in row.content.items() if name != "host"})
        for row in session.execute(contents)
    }
    return {epoch: hashes[environment] for epoch, environment in of_epoch.items()}


def trusted_bases(
    session: Session,
    series_ids: Sequence[int],
    *,
    lag: int = BASE_LAG_COMMITS,
    branch: str | None = None,
    histories: Mapping[int, Sequence[TimedPoint]] | None = None,
) -> dict[int, str]:
    """Return the base commits for the next nightly comparison of series that have results.

    The base is the newest commit of the newest epoch that is `lag` commits older than the latest
    one; on a series with an open alert, the alert's first bad commit if that is newer. Without this
    distance, a step that was not confirmed in its first night would be part of the base of the
    second night (docs/statistics.md). branch: as of series_histories. histories: what
    timed_histories returned, of at least these series; None: read.
    """
    if histories is None:
        histories = timed_histories(session, series_ids, branch=branch)
    bad = (
        select(Decision.series_id, func.max(Commit.position))
        .join(Alert, Decision.alert_id == Alert.id)
        .join(Commit, Alert.bad_commit_id == Commit.id)
        .where(Decision.series_id.in_(series_ids), Alert.state.in_(OPEN_STATES))
        .group_by(Decision.series_id)
    )
    known = dict(session.execute(bad).all())
    return {
        series: _trusted_of(histories[series], known.get(series), lag)
        for series in series_ids
        if series in histories
    }


def _trusted_of(points: Sequence[TimedPoint], bad: int | None, lag: int) -> str:
    """Return the base of a history. bad: place of the newest bad commit of its open alerts."""
    orders = {p.commit: p.topo_order or 0 for p in points if p.epoch == points[-1].epoch}
    shas = list(orders)
    trusted = max(len(shas) - 1 - lag, 0)
    # What the alert reports is known: only a further change is news.
    if bad is not None and orders[shas[trusted]] < bad:
        return next((sha for sha in shas[trusted:] if orders[sha] >= bad), shas[trusted])
    return shas[trusted]


def explained_orders(session: Session, series_ids: Sequence[int]) -> dict[int, list[int]]:
    """Return topo_order of the commits where an explained change opens an epoch, by series."""
    query = (
        select(EpochBreak.series_id, Commit.position)
        .join(Commit, EpochBreak.commit_id == Commit.id)
        .where(EpochBreak.series_id.in_(series_ids), Commit.position.is_not(None))
        .order_by(Commit.position)
    )
    orders: dict[int, list[int]] = {}
    for series, order in session.execute(query):
        if order is not None:
            orders.setdefault(series, []).append(order)
    return orders


def kernel_names(session: Session) -> tuple[str, ...]:
    """Return all measured kernels, without variants, sorted."""
    return tuple(sorted(session.scalars(select(Series.kernel).distinct())))


def filter_values(session: Session) -> FilterValues:
    """Return all values that occur, for the options of a page or a message."""

    def distinct(column: Any) -> tuple[Any, ...]:
        values = session.scalars(select(column).distinct()).all()
        return tuple(sorted(value for value in values if value not in ("", None)))

    return FilterValues(
        suites=distinct(Run.suite),
        kernels=distinct(Series.kernel),
        gpus=distinct(Series.gpu),
        models=distinct(Measurement.model),
        layers=distinct(Measurement.layer),
        stages=distinct(Series.stage),
        caches=distinct(Series.cache),
        statuses=distinct(Measurement.status),
        operations=distinct(Series.operation),
        m=distinct(Series.m),
        projects=distinct(Series.project),
    )


_BATCH = 500  # series per statement
_TIMED_COMMITS = 60


def recent_histories(
    session: Session, series_ids: Iterable[int], *, results: int = 30
) -> dict[int, list[HistoryPoint]]:
    """Return the newest accepted results by series, in order of ancestry, without sweeps.

    results: number per series; more if several have the same time. Series without a result are left
    out. Epochs count from 1 within the returned points. Older measurements are not read.
    """
    newest = Measurement.created_at >= _time_of_newest(results)
    conditions = newest, Run.trigger != SWEEP
    return _in_batches(
        sorted(set(series_ids)),
        lambda batch: _histories(session, batch, MAIN_LINE, HistoryPoint, *conditions),
    )


def _in_batches(
    ids: Sequence[int], query: Callable[[Sequence[int]], dict[int, list[Point]]]
) -> dict[int, list[Point]]:
    histories: dict[int, list[Point]] = {}
    for start in range(0, len(ids), _BATCH):
        histories |= query(ids[start : start + _BATCH])
    return histories


def noise_sigmas(session: Session, series_ids: Sequence[int]) -> dict[int, tuple[float, int]]:
    """Return the newest A/A sigma of ln(head / base) and its number of comparisons, by series."""
    query = (
        select(Noise.series_id, Noise.estimate_sigma, Noise.comparisons)
        .where(Noise.series_id.in_(list(series_ids)))
        .order_by(Noise.computed_at, Noise.id)
    )
    return {row.series_id: (row.estimate_sigma, row.comparisons) for row in session.execute(query)}


def _time_of_newest(results: int) -> ColumnElement[Any]:
    """The time of the last of so many newest results on the main line of a Series in a query."""
    measurement = aliased(Measurement)
    last = (
        select(measurement.created_at)
        .where(
            measurement.series_id == Series.id,
            measurement.accepted,
            measurement.median_us.is_not(None),
            is_on_main(measurement.commit_id.expression),
        )
        .order_by(measurement.created_at.desc())
        .offset(results - 1)
        .limit(1)
        .correlate(Series)
        .scalar_subquery()
    )
    first = (
        select(func.min(measurement.created_at))
        .where(measurement.series_id == Series.id)
        .correlate(Series)
        .scalar_subquery()
    )
    return func.coalesce(last, first)


def _place_of_newest(commits: int, until: int | None) -> ColumnElement[Any]:
    """The place of the last of so many newest commits on the main line of a Series in a query."""
    commit = aliased(Commit)
    is_of_series = Measurement.series_id == Series.id, Measurement.commit_id == commit.id
    counts = Measurement.accepted, Measurement.median_us.is_not(None), Run.trigger != SWEEP
    is_measured = select(Measurement.id).join(Run).where(*is_of_series, *counts)
    last = (
        select(commit.position)
        .where(commit.project == Series.project)
        .where(commit.position.is_not(None) if until is None else commit.position <= until)
        .where(is_measured.correlate(Series, commit).exists())
        .order_by(commit.position.desc())
        .offset(commits - 1)
        .limit(1)
        .correlate(Series)
        .scalar_subquery()
    )
    return func.coalesce(last, 0)


def _histories(
    session: Session,
    series_ids: Sequence[int],
    line: Line,
    point: type[Point],
    *conditions: ColumnElement[bool],
) -> dict[int, list[Point]]:
    query = (
        select(Measurement.series_id, *history_columns(line.position, point))
        .select_from(Series)
        .join(Measurement, Measurement.series_id == Series.id)
        .join(Commit, Measurement.commit_id == Commit.id)
        .join(Run, Measurement.run_id == Run.id)
        .where(
            Series.id.in_(series_ids),
            Measurement.series_id.in_(series_ids),  # so that PostgreSQL uses this index
            Measurement.accepted,
            Measurement.median_us.is_not(None),
            line.is_member,
            *conditions,
        )
        .order_by(Measurement.series_id, line.position, Measurement.created_at, Measurement.uuid)
    )
    if line.is_own is not None:
        query = query.outerjoin(BranchCommit, line.is_own)
    breaks = explained_orders(session, series_ids)
    environments = epoch_environments(session, series_ids)
    rows = session.connection().execute(query).all()  # Core, not ORM: faster
    return {
        series: points_of(group, breaks.get(series, ()), environments, point)
        for series, group in groupby(rows, key=itemgetter(0))
    }
