"""Queries for the newest results of many series at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased

from flexq_bench.db.queries.latest import SWEEP
from flexq_bench.db.queries.series import (
    HistoryPoint,
    epoch_environments,
    explained_orders,
    history_columns,
    points_of,
)
from flexq_bench.db.tables import Commit, Measurement, Noise, Run, Series

_BATCH = 500  # series per statement


def recent_histories(
    session: Session, series_ids: Iterable[int], *, results: int = 30
) -> dict[int, list[HistoryPoint]]:
    """Return the newest accepted results by series, in order of ancestry, without sweeps.

    results: number per series; more if several have the same time. Series without a result are left
    out. Epochs count from 1 within the returned points. Older measurements are not read.
    """
    ids = sorted(set(series_ids))
    histories: dict[int, list[HistoryPoint]] = {}
    for start in range(0, len(ids), _BATCH):
        histories |= _histories(session, ids[start : start + _BATCH], results)
    return histories


def noise_sigmas(session: Session, series_ids: Sequence[int]) -> dict[int, tuple[float, int]]:
    """Return the newest A/A sigma of ln(head / base) and its number of comparisons, by series."""
    query = (
        select(Noise.series_id, Noise.estimate_sigma, Noise.comparisons)
        .where(Noise.series_id.in_(list(series_ids)))
        .order_by(Noise.computed_at, Noise.id)
    )
    return {row.series_id: (row.estimate_sigma, row.comparisons) for row in session.execute(query)}


def _histories(
    session: Session, series_ids: Sequence[int], results: int
) -> dict[int, list[HistoryPoint]]:
    measurement = aliased(Measurement)
    last = (
        select(measurement.created_at)
        .where(
            measurement.series_id == Series.id,
            measurement.accepted,
            measurement.median_us.is_not(None),
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
    query = (
        select(Measurement.series_id, *history_columns())
        .select_from(Series)
        .join(Measurement, Measurement.series_id == Series.id)
        .join(Commit, Measurement.commit_id == Commit.id)
        .join(Run, Measurement.run_id == Run.id)
        .where(
            Series.id.in_(series_ids),
            Measurement.series_id.in_(series_ids),  # so that PostgreSQL uses this index
            Measurement.created_at >= func.coalesce(last, first),
            Measurement.accepted,
            Measurement.median_us.is_not(None),
            Run.trigger != SWEEP,
        )
        .order_by(
            Measurement.series_id,
            Commit.topo_order.nulls_last(),
            Measurement.created_at,
            Measurement.uuid,
        )
    )
    breaks = explained_orders(session, series_ids)
    environments = epoch_environments(session, series_ids)
    rows = session.connection().execute(query).all()  # Core, not ORM: faster
    return {
        series: points_of((row[1:] for row in group), breaks.get(series, ()), environments)
        for series, group in groupby(rows, key=itemgetter(0))
    }
