"""Queries for the newest result of every series, also at a given commit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session, aliased

from flexq_bench.db.queries.filters import Filters
from flexq_bench.db.queries.results import RESULT_COLUMNS, ResultRow
from flexq_bench.db.records import TIME_METRICS
from flexq_bench.db.tables import Commit, Measurement, Run, Series

BOOST = "boost"
SCHEDULED = "nightly"  # trigger of scheduled runs
SWEEP = "sweep"  # trigger of one-off runs by users
_GPU_BACKEND = "cuda"
_NEWEST_RUNS = 5  # more than one: the newest may have no result yet


def latest_results(
    session: Session, filters: Filters | None = None, *, regime: str = BOOST
) -> list[ResultRow]:
    """Return the newest accepted time of every series, ordered by kernel, GPU, shape.

    Newest by time of measurement, over all runs; series without one are left out. Uses one index
    lookup per series, no table scan. filters: only those on series, suites and triggers apply.
    regime: only times of this regime; protocol 1, without regimes, counts as `boost`.
    """
    return _newest_of_series(session, filters or Filters(), [], regime)


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
    run_conditions = []
    if filters.suites:
        run_conditions.append(Run.suite.in_(filters.suites))
    if filters.without_triggers:
        run_conditions.append(Run.trigger.not_in(filters.without_triggers))
    on_run = [_newest.run_id.in_(select(Run.id).where(*run_conditions))] if run_conditions else []
    newest = (
        select(_newest.id)
        .where(
            _newest.series_id == Series.id,
            _newest.accepted,
            *conditions,
            *on_run,
        )
        .order_by(_newest.created_at.desc(), _newest.id.desc())
        .limit(1)
        .correlate(Series)
        .scalar_subquery()
    )
    query = (
        select(*RESULT_COLUMNS)
        .select_from(Series)
        .join(Measurement, Measurement.id == newest)
        .join(Run, Measurement.run_id == Run.id)
        .join(Commit, Measurement.commit_id == Commit.id)
        .where(Series.metric == TIME_METRICS[regime], *filters.on_series())
        .order_by(
            Series.kernel, Series.variant, Series.gpu, Series.n, Series.k, Series.m, Series.id
        )
    )
    return [ResultRow(*row) for row in session.execute(query)]
