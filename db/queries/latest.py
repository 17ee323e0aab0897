"""Questions about the newest result of every series, and about the results at a commit."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session, aliased

from db.queries.filters import Filters
from db.queries.results import RESULT_COLUMNS, ResultRow
from db.tables import Commit, Measurement, Run, Series

_TIME = "time"


def latest_results(session: Session, filters: Filters | None = None) -> list[ResultRow]:
    """The newest accepted time of every series, ordered by kernel, GPU, shape.

    Newest as measured, whichever run it comes from; a series without one is left out. It looks up
    one measurement a series and scans no table of them. filters: those on series, and suites.
    """
    return _newest_of_series(session, filters or Filters(), [])


def gpu_names(session: Session) -> tuple[str, ...]:
    """Every SKU that something was ever timed on, sorted. It reads no measurement."""
    query = select(Series.gpu).where(Series.metric == _TIME).distinct().order_by(Series.gpu)
    return tuple(session.scalars(query))


def results_at_commit(
    session: Session, sha: str, filters: Filters | None = None
) -> list[ResultRow]:
    """The newest accepted time of every series at a commit without local changes; as above."""
    at = select(Commit.id).where(Commit.sha == sha, Commit.dirty.is_(False)).scalar_subquery()
    return _newest_of_series(session, filters or Filters(), [_newest.commit_id == at])


_newest = aliased(Measurement)


def _newest_of_series(
    session: Session, wanted: Filters, conditions: Sequence[ColumnElement[bool]]
) -> list[ResultRow]:
    on_suite = [_newest.run_id.in_(select(Run.id).where(Run.suite.in_(wanted.suites)))]
    newest = (
        select(_newest.id)
        .where(
            _newest.series_id == Series.id,
            _newest.accepted,
            *conditions,
            *(on_suite if wanted.suites else ()),
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
        .where(Series.metric == _TIME, *wanted.on_series())
        .order_by(
            Series.kernel, Series.variant, Series.gpu, Series.n, Series.k, Series.m, Series.id
        )
    )
    return [ResultRow(*row) for row in session.execute(query)]
