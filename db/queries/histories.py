"""Questions about many series at once: the newest results of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased

from db.queries.latest import SWEEP
from db.queries.series import HistoryPoint, explained_orders, history_columns, points_of
from db.tables import Commit, Measurement, Noise, Run, Series

_AT_ONCE = 500  # series in one statement


def recent_histories(
    session: Session, series_ids: Iterable[int], *, results: int = 30
) -> dict[int, list[HistoryPoint]]:
    """By series its newest accepted results, in order of ancestry; sweeps are left out.

    results: about how many of each; those of the same moment come along. A series without one is
    left out. Epochs count from 1 in what is returned. It reads no other measurement.
    """
    wanted = sorted(set(series_ids))
    found: dict[int, list[HistoryPoint]] = {}
    for start in range(0, len(wanted), _AT_ONCE):
        found |= _histories(session, wanted[start : start + _AT_ONCE], results)
    return found


def noise_sigmas(session: Session, series_ids: Sequence[int]) -> dict[int, tuple[float, int]]:
    """By series from the A/A calibration: the newest sigma of a comparison (ln(head / base) of one
    commit), and from how many comparisons."""
    query = (
        select(Noise.series_id, Noise.estimate_sigma, Noise.comparisons)
        .where(Noise.series_id.in_(list(series_ids)))
        .order_by(Noise.computed_at, Noise.id)
    )
    return {row.series_id: (row.estimate_sigma, row.comparisons) for row in session.execute(query)}


def _histories(
    session: Session, series_ids: Sequence[int], results: int
) -> dict[int, list[HistoryPoint]]:
    one = aliased(Measurement)
    last = (
        select(one.created_at)
        .where(one.series_id == Series.id, one.accepted, one.median_us.is_not(None))
        .order_by(one.created_at.desc())
        .offset(results - 1)
        .limit(1)
        .correlate(Series)
        .scalar_subquery()
    )
    first = (
        select(func.min(one.created_at))
        .where(one.series_id == Series.id)
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
            Measurement.series_id.in_(series_ids),  # says to PostgreSQL which index to look up
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
    rows = session.connection().execute(query).all()  # plain columns: nothing for the ORM to make
    return {
        series: points_of((row[1:] for row in of), breaks.get(series, ()))
        for series, of in groupby(rows, key=itemgetter(0))
    }
