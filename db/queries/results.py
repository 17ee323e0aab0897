"""Queries for measurements: newest results, tables, details, raw samples and durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, Select, func, or_, select
from sqlalchemy.orm import Session, aliased

from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.queries.filters import SERIES_ORDER, Filters, is_latest_attempt
from flexq_bench.db.queries.lines import is_on_main
from flexq_bench.db.queries.pages import Listing, Page, count_of
from flexq_bench.db.queries.rows import columns_of, rows_of
from flexq_bench.db.records import COMPARABLE_STATUSES, EXTERNAL_BACKEND, TIME_METRICS
from flexq_bench.db.samples import unpack
from flexq_bench.db.tables import (
    Commit,
    Device,
    Environment,
    Epoch,
    Measurement,
    Run,
    Sample,
    Series,
)


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One measurement without its samples. Units and None as in db.records.Record."""

    uuid: str
    run: str  # uuid
    suite: str
    case: str
    series_id: int
    kernel: str
    variant: str
    backend: str
    stage: str
    cache: str
    gpu: str
    model: str
    layer: str
    operation: str
    parameters: str
    m: int | None
    n: int | None
    k: int | None
    weight_bits: int
    act_bits: int
    status: str
    detail: str
    accepted: bool
    median_us: float | None
    ci_low_us: float | None
    ci_high_us: float | None
    n_samples: int
    floor_us: float | None
    pct_of_floor: float | None
    launch_us: float | None
    tops: float | None
    max_rel_error: float | None
    exact: bool | None
    config: dict[str, Any]
    commit: str  # sha
    dirty: bool
    created_at: datetime
    protocol_version: int
    regime: str | None
    metric: str = "time"
    unit: str = "us"
    direction: str = "lower"
    project: str = ""  # empty: this repository


_RESULT_COLUMNS = columns_of(
    *(ResultRow, Measurement, Series),
    run=Run.uuid,
    suite=Run.suite,
    case=Measurement.case_key,
    commit=Commit.sha,
    dirty=Commit.dirty,
    project=Series.project,
)


def results_table(
    session: Session, filters: Filters | None = None, *, limit: int | None = None
) -> list[ResultRow]:
    """Return one row per run and case (its last measurement), newest run first."""
    query = (
        _results(filters or Filters())
        .where(is_latest_attempt())
        .order_by(Run.created_at.desc(), Run.id.desc(), Measurement.created_at, Measurement.id)
        .limit(limit)
    )
    return rows_of(session, ResultRow, query)


def _results(filters: Filters) -> Select[Any]:
    conditions = (*filters.on_series(), *filters.on_measurement())
    return (
        _joined(select(*_RESULT_COLUMNS))
        .join(Commit, Measurement.commit_id == Commit.id)
        .where(*conditions)
    )


def _joined(query: Select[Any]) -> Select[Any]:
    return (
        query.select_from(Measurement)
        .join(Run, Measurement.run_id == Run.id)
        .join(Series, Measurement.series_id == Series.id)
    )


def run_results(session: Session, run_uuid: str) -> list[ResultRow]:
    """Return the results of a run in measurement order; empty: no results, or no such run."""
    return results_table(session, Filters(runs=(run_uuid,)))


_BY_TIME = Listing(Measurement.uuid, (Measurement.created_at, Measurement.id), (False, False))
_BY_SERIES = Listing(Series.id, (Series.id,), (False,))


def run_results_page(
    session: Session, run_uuid: str, filters: Filters, page: Page, *, counted: bool = True
) -> tuple[list[ResultRow], int | None]:
    """Return a page of `run_results`, and the number of all; filters: further ones.

    counted False: None for their number. Without filters it is `received` of the run's summary.
    """
    in_run = Measurement.run_id == select(Run.id).where(Run.uuid == run_uuid).scalar_subquery()
    query = _results(filters).where(in_run, is_latest_attempt())
    rows = rows_of(session, ResultRow, _BY_TIME.page(session, query, page))
    if not counted:
        return rows, None
    conditions = (in_run, *filters.on_series(), *filters.on_measurement(), is_latest_attempt())
    count = _joined(select(Measurement.id)).where(*conditions)
    return rows, count_of(session, count)


def asked_questions(session: Session, measurement_uuids: Sequence[str]) -> dict[str, str]:
    """Return the hash of the questions whose answers are a result's samples, by uuid; "": none."""
    query = select(Measurement.uuid, Measurement.extra)
    rows = session.execute(query.where(Measurement.uuid.in_(measurement_uuids)))
    return {uuid: str(extra.get("questions") or "") for uuid, extra in rows}


def samples_of(session: Session, measurement_uuid: str) -> tuple[tuple[float, ...], ...]:
    """Return raw samples in microseconds by placement, in measurement order.

    Empty: never timed, or pruned. Raises NotFoundError if the measurement is not stored.
    """
    row = session.execute(
        select(Sample.data, Sample.placement_counts)
        .select_from(Measurement)
        .outerjoin(Sample, Sample.measurement_id == Measurement.id)
        .where(Measurement.uuid == measurement_uuid)
    ).one_or_none()
    if row is None:
        raise NotFoundError(f"no measurement {measurement_uuid} is stored")
    return () if row.data is None else unpack(row.data, row.placement_counts)


@dataclass(frozen=True, slots=True)
class ResultDetail:
    """A result with the state of its device; units and None as in db.records.Record.

    environment: name -> text. extra: additional data, for example the device state before and
    after, and the indices of invalid samples.
    """

    result: ResultRow
    device: str  # uuid
    n_invalid: int
    placement_medians_us: tuple[float, ...]
    seed: int
    sm_clock_mhz: float | None
    mem_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle_mask: int | None
    environment: dict[str, str]
    extra: dict[str, Any]


def result_detail(session: Session, measurement_uuid: str) -> ResultDetail:
    """Return the details of a measurement. Raises NotFoundError if it is not stored."""
    details = columns_of(
        *(ResultDetail, Measurement), device=Device.uuid, environment=Environment.content
    )
    query = (
        select(*_RESULT_COLUMNS, *details)
        .select_from(Measurement)
        .join(Run, Measurement.run_id == Run.id)
        .join(Series, Measurement.series_id == Series.id)
        .join(Commit, Measurement.commit_id == Commit.id)
        .join(Device, Measurement.device_id == Device.id)
        .join(Epoch, Measurement.epoch_id == Epoch.id)
        .join(Environment, Epoch.environment_id == Environment.id)
        .where(Measurement.uuid == measurement_uuid)
    )
    row = session.execute(query).one_or_none()
    if row is None:
        raise NotFoundError(f"no measurement {measurement_uuid} is stored")
    device, n_invalid, medians, *state = row[len(_RESULT_COLUMNS) :]
    result = ResultRow(*row[: len(_RESULT_COLUMNS)])
    return ResultDetail(result, device, n_invalid, tuple(medians), *state)


BOOST = "boost"
SCHEDULED = "nightly"  # trigger of scheduled runs
SWEEP = "sweep"  # trigger of one-off runs by users
BACKFILL = "backfill"  # trigger of runs at earlier commits, which are later than newer results
_GPU_BACKEND = "cuda"
_NEWEST_RUNS = 5  # more than one: the newest may have no result yet


def latest_results(
    session: Session, filters: Filters | None = None, *, regime: str = BOOST
) -> list[ResultRow]:
    """Return the newest accepted time of every series, ordered by kernel, GPU, shape.

    Newest by time of measurement, over all runs at commits of the main line; series without one are
    left out. Uses one index lookup per series, no table scan. filters: only those on series, suites
    and triggers apply.
    regime: only times of this regime; protocol 1, without regimes, counts as `boost`.
    """
    on_main = [is_on_main(_newest.commit_id.expression)]
    latest = _without_backfill(filters or Filters())
    return _newest_of_series(session, latest, on_main, regime)


def latest_results_elsewhere(session: Session, filters: Filters) -> list[ResultRow]:
    """Return the newest comparable time of every series that latest_results leaves out.

    Those of commits off the main line, of checkouts with changes, and beside other programs.
    """
    latest = _without_backfill(filters)
    usable = _newest_id(latest, [is_on_main(_newest.commit_id.expression)])
    comparable = _newest.status.in_(COMPARABLE_STATUSES)
    query = (
        _with_newest(_newest_id(latest, [comparable], accepted=False))
        .where(Series.metric == TIME_METRICS[BOOST], *filters.on_series(), usable.is_(None))
        .order_by(*SERIES_ORDER)
    )
    return rows_of(session, ResultRow, query)


def latest_results_page(
    session: Session, filters: Filters, page: Page, *, regime: str = BOOST
) -> tuple[list[ResultRow], int]:
    """Return a page of the newest accepted result of every series by its id, and their number.

    As latest_results, with the results of other tools, whatever they count; and with filters on
    measurements: the newest result that these match. filters.metrics: instead of the regime's time.
    """
    on_main = [is_on_main(_newest.commit_id.expression)]
    newest = _newest_id(_without_backfill(filters), on_main)
    conditions = [*filters.on_series()]
    if not filters.metrics:
        is_time = Series.metric == TIME_METRICS[regime]
        conditions.append(or_(is_time, Series.backend == EXTERNAL_BACKEND))
    query = _with_newest(newest).where(*conditions)
    rows = rows_of(session, ResultRow, _BY_SERIES.page(session, query, page))
    counted = select(Series.id).where(*conditions, newest.is_not(None))
    return rows, count_of(session, counted)


def operation_names(session: Session, gpu: str) -> tuple[str, ...]:
    """Return the operations that were timed on a SKU, sorted."""
    query = (
        select(Series.operation)
        .where(Series.gpu == gpu, Series.metric.in_(TIME_METRICS.values()), Series.operation != "")
        .distinct()
    )
    return tuple(sorted(session.scalars(query)))


def gpu_names(session: Session) -> tuple[str, ...]:
    """Return all SKUs with timed series: GPUs before CPUs, then by name, without a table scan.

    The SKU of the newest scheduled run comes first: it is the usual choice on a page.
    """
    timed = Series.metric.in_(TIME_METRICS.values())
    kinds = session.execute(select(Series.gpu, Series.backend).where(timed).distinct()).all()
    scheduled = session.scalar(
        select(Series.gpu)
        .select_from(Run)
        .join(Measurement, Measurement.run_id == Run.id)
        .join(Series, Measurement.series_id == Series.id)
        .where(Run.trigger == SCHEDULED, Series.backend == _GPU_BACKEND)
        .order_by(Run.created_at.desc(), Run.id.desc())
        .limit(1)
    )
    order = sorted(
        (kind.gpu != scheduled, kind.backend != _GPU_BACKEND, kind.gpu) for kind in kinds
    )
    return tuple(dict.fromkeys(gpu for _, _, gpu in order))


def newest_result_at(session: Session) -> datetime | None:
    """Return the time of the newest result of the newest runs; None: there is none."""
    newest = select(Run.id).order_by(Run.created_at.desc(), Run.id.desc()).limit(_NEWEST_RUNS)
    query = select(func.max(Measurement.created_at)).where(
        Measurement.run_id.in_(newest.scalar_subquery())
    )
    return session.scalar(query)


def regimes_of(session: Session, gpu: str) -> tuple[str, ...]:
    """Return the regimes with timed series on a SKU, boost first. Reads no measurement."""
    metrics = set(session.scalars(select(Series.metric).where(Series.gpu == gpu).distinct()))
    return tuple(regime for regime, metric in TIME_METRICS.items() if metric in metrics)


def results_at_commit(
    session: Session, sha: str, filters: Filters | None = None, *, project: str = ""
) -> list[ResultRow]:
    """Return the newest accepted time of every series at a clean commit, as latest_results.

    project: of the commit; empty: this repository.
    """
    of_sha = select(Commit.id).where(Commit.sha == sha, Commit.dirty.is_(False))
    at = of_sha.where(Commit.project == project).scalar_subquery()
    return _newest_of_series(session, filters or Filters(), [_newest.commit_id == at], BOOST)


_newest = aliased(Measurement)


def _newest_of_series(
    session: Session, filters: Filters, conditions: Sequence[ColumnElement[bool]], regime: str
) -> list[ResultRow]:
    on_runs = Filters(suites=filters.suites, without_triggers=filters.without_triggers)
    query = (
        _with_newest(_newest_id(on_runs, conditions))
        .where(Series.metric == TIME_METRICS[regime], *filters.on_series())
        .order_by(*SERIES_ORDER)
    )
    return rows_of(session, ResultRow, query)


def _newest_id(
    filters: Filters, conditions: Sequence[ColumnElement[bool]], *, accepted: bool = True
) -> ScalarSelect[Any]:
    """Return the id of the newest accepted measurement of a series that filters match; or null.

    accepted: False: also of one that is not accepted.
    """
    run_conditions = []
    if filters.suites:
        run_conditions.append(Run.suite.in_(filters.suites))
    if filters.without_triggers:
        run_conditions.append(Run.trigger.not_in(filters.without_triggers))
    on_run = [_newest.run_id.in_(select(Run.id).where(*run_conditions))] if run_conditions else []
    usable = [_newest.accepted] if accepted else []
    in_time = []
    if filters.since is not None:
        in_time.append(_newest.created_at >= filters.since)
    if filters.until is not None:
        in_time.append(_newest.created_at <= filters.until)
    return (
        select(_newest.id)
        .where(_newest.series_id == Series.id, *usable, *conditions, *on_run, *in_time)
        .order_by(_newest.created_at.desc(), _newest.id.desc())
        .limit(1)
        .correlate(Series)
        .scalar_subquery()
    )


def _without_backfill(filters: Filters) -> Filters:
    """Results of earlier commits, measured later, are not the latest."""
    return replace(filters, without_triggers=(*filters.without_triggers, BACKFILL))


def _with_newest(newest: ColumnElement[Any]) -> Select[Any]:
    return (
        select(*_RESULT_COLUMNS)
        .select_from(Series)
        .join(Measurement, Measurement.id == newest)
        .join(Run, Measurement.run_id == Run.id)
        .join(Commit, Measurement.commit_id == Commit.id)
    )


WALL_S = "wall_s"  # in a measurement's `extra`: seconds from its start to its end


def case_seconds(
    session: Session, gpu: str | None = None, *, limit: int = 20_000
) -> list[tuple[str, float]]:
    """Return case keys and wall times (s) of measurements, newest first. gpu: only on this SKU."""
    seconds = Measurement.extra[WALL_S].as_float()
    query = (
        select(Measurement.case_key, seconds)
        .join(Series, Measurement.series_id == Series.id)
        .where(seconds >= 0)
        .order_by(Measurement.created_at.desc(), Measurement.id.desc())
        .limit(limit)
    )
    if gpu is not None:
        query = query.where(Series.gpu == gpu)
    return [(key, float(value)) for key, value in session.execute(query)]
