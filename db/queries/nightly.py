"""Queries for nightly runs, their outcomes and verdicts, and for change points."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, func, or_, select
from sqlalchemy.orm import Session

from flexq_bench.db.queries.filters import Filters, is_latest_attempt
from flexq_bench.db.queries.pages import Listing, Page, count_of
from flexq_bench.db.queries.rows import columns_of, rows_of
from flexq_bench.db.tables import ChangePoint, Commit, Decision, Measurement, Night, Run, Series

RECENT_DAYS = 30  # before the newest decision


@dataclass(frozen=True, slots=True)
class NightState:
    """State of a nightly run on one GPU model, for commits of one project.

    report: empty until the run is judged. plan: see set_night; None: not planned yet.
    """

    key: str
    name: str
    suite: str
    gpu: str
    run: str  # uuid
    commit: str  # sha
    project: str
    dirty: bool
    state: str
    report: dict[str, Any]
    updated_at: datetime
    plan: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ChangePointRow:
    """Change point of a series: the commit at which its level changed; levels in its unit.

    retracted: reason of the retraction; None: not retracted.
    """

    id: int
    series_id: int
    commit: str  # sha of the first on the new level
    before: float
    after: float
    decision: str  # uuid
    retracted: str | None


def night_states(
    session: Session,
    *,
    key: str | None = None,
    name: str | None = None,
    suite: str | None = None,
    project: str | None = None,
    state: str | None = None,
    limit: int | None = None,
) -> list[NightState]:
    """Return nightly runs, latest first, then by GPU. None as a filter: all."""
    query = _nights().order_by(Night.name.desc(), Night.gpu).limit(limit)
    filters = (
        (Night.key, key),
        (Night.name, name),
        (Night.suite, suite),
        (Night.state, state),
        (Commit.project, project),
    )
    for column, value in filters:
        if value is not None:
            query = query.where(column == value)
    return rows_of(session, NightState, query)


def _nights() -> Select[Any]:
    return (
        select(*columns_of(NightState, Night, Commit, run=Run.uuid, commit=Commit.sha))
        .join(Run, Night.run_id == Run.id)
        .join(Commit, Run.commit_id == Commit.id)
    )


_LATEST_FIRST = Listing(Night.key, (Night.name, Night.gpu, Night.id), (True, False, False))


def nights_page(
    session: Session,
    filters: Filters,
    page: Page,
    *,
    names: Sequence[str] = (),
    states: Sequence[str] = (),
) -> tuple[list[NightState], int]:
    """Return a page of the nightly runs, latest first, then by GPU, and the number of all.

    filters: suites, gpus, projects, since and until (last change of its state) apply.
    """
    conditions: list[ColumnElement[bool]] = [
        column.in_(values)
        for column, values in (
            (Night.name, names),
            (Night.state, states),
            (Night.suite, filters.suites),
            (Night.gpu, filters.gpus),
            (Commit.project, filters.projects),
        )
        if values
    ]
    if filters.since is not None:
        conditions.append(Night.updated_at >= filters.since)
    if filters.until is not None:
        conditions.append(Night.updated_at <= filters.until)
    query = _nights().where(*conditions)
    rows = rows_of(session, NightState, _LATEST_FIRST.page(session, query, page))
    return rows, count_of(session, query.with_only_columns(Night.id))


def unfinished_nights(session: Session) -> list[NightState]:
    """Return the nightly runs that are not done, latest first."""
    states = ("measuring", "comparing")
    nights = [night for state in states for night in night_states(session, state=state)]
    return sorted(nights, key=lambda night: (night.name, night.gpu), reverse=True)


def change_points_of(
    session: Session, series_id: int, *, with_retracted: bool = False
) -> list[ChangePointRow]:
    """Return the stored change points of a series, oldest commit first (ancestry, not clock)."""
    by_series = change_points_by_series(session, [series_id], with_retracted=with_retracted)
    return by_series.get(series_id, [])


def change_points_by_series(
    session: Session, series_ids: Sequence[int], *, with_retracted: bool = False
) -> dict[int, list[ChangePointRow]]:
    """Return the stored change points by series, like `change_points_of`; others are left out."""
    query = _change_points(ChangePoint.series_id.in_(series_ids))
    if not with_retracted:
        query = query.where(ChangePoint.retracted_at.is_(None))
    rows: dict[int, list[ChangePointRow]] = {}
    for *values, series in session.execute(query.add_columns(ChangePoint.series_id)):
        rows.setdefault(series, []).append(ChangePointRow(*values))
    return rows


def change_points_by_decision(
    session: Session, decisions: Iterable[str]
) -> dict[str, ChangePointRow]:
    """Return the stored change points of decisions, withdrawn ones too, by the decision's uuid."""
    query = _change_points(Decision.uuid.in_(list(decisions)))
    return {row.decision: row for row in reversed(rows_of(session, ChangePointRow, query))}


def _change_points(condition: ColumnElement[bool]) -> Select[Any]:
    return (
        select(
            *columns_of(
                *(ChangePointRow, ChangePoint),
                commit=Commit.sha,
                decision=Decision.uuid,
                retracted=ChangePoint.retraction_reason,
            )
        )
        .join(Decision, ChangePoint.decision_id == Decision.id)
        .join(Commit, ChangePoint.commit_id == Commit.id)
        .where(condition)
        .order_by(Commit.position.nulls_last(), ChangePoint.id)
    )


_IDENTITY = [c for c in Series.__table__.columns if c.name not in ("id", "identity_hash")]


def series_identity_of(session: Session, series_id: int) -> Mapping[str, Any]:
    """Return the full identity of a stored series (db.writer.series_identity)."""
    row = session.execute(select(*_IDENTITY).where(Series.id == series_id)).mappings().one()
    return _identity(row)


def series_of_run(session: Session, run: str) -> dict[str, Mapping[str, Any]]:
    """Return the full identity of the series of each result of a run, by the key of its case."""
    rows = session.execute(
        select(Measurement.case_key, *_IDENTITY)
        .join(Series, Measurement.series_id == Series.id)
        .join(Run, Measurement.run_id == Run.id)
        .where(Run.uuid == run)
    ).mappings()
    return {row["case_key"]: _identity(row) for row in rows}


def _identity(row: RowMapping) -> dict[str, Any]:
    """The identity in a row; a project of none is left out, as when it was hashed."""
    named = {column.name: row[column.name] for column in _IDENTITY}
    return {name: value for name, value in named.items() if name != "project" or value}


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """Cases of a run on one GPU model with the same status and detail.

    cases: number, by their last measurement. example: key of one of them.
    """

    run: str  # uuid
    gpu: str
    status: str
    detail: str
    cases: int
    example: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdicts of one night, or of one gate, on one GPU model.

    project: of the commits; empty: this repository. watched: of the watched branch, as nights are.
    heads: shas of the judged commits. verdicts: number of decisions by verdict.
    """

    project: str
    gpu: str
    watched: bool
    created_at: datetime
    heads: tuple[str, ...]
    verdicts: dict[str, int]


def run_outcomes(session: Session, run_uuids: Sequence[str]) -> list[OutcomeRow]:
    """Count the cases of these runs by outcome, most cases first."""
    cases = func.count().label("cases")
    query = (
        select(
            Run.uuid.label("run"),
            Series.gpu,
            Measurement.status,
            Measurement.detail,
            cases,
            func.min(Measurement.case_key).label("example"),
        )
        .select_from(Measurement)
        .join(Run, Measurement.run_id == Run.id)
        .join(Series, Measurement.series_id == Series.id)
        .where(Run.uuid.in_(list(run_uuids)), is_latest_attempt())
        .group_by(Run.uuid, Series.gpu, Measurement.status, Measurement.detail)
        .order_by(cases.desc(), Measurement.status, Measurement.detail, Series.gpu)
    )
    return rows_of(session, OutcomeRow, query)


def judgements(session: Session, *, gate_detector: str, days: int = RECENT_DAYS) -> list[Judgement]:
    """Return what nights and gates decided, newest first, then by project and GPU.

    gate_detector: that of gates, whose decisions are not on the watched branch; those of other
    detectors there, such as change points found in retrospect, are left out, as are comparisons of
    a commit with itself. days: before the newest decision.
    """
    newest = session.scalar(select(func.max(Decision.created_at)))
    if newest is None:
        return []
    query = (
        select(
            *(Series.project, Series.gpu, Decision.watched, Decision.created_at),
            *(Commit.sha, Decision.verdict, func.count().label("decisions")),
        )
        .select_from(Decision)
        .join(Series, Decision.series_id == Series.id)
        .join(Commit, Decision.head_commit_id == Commit.id)
        .where(Decision.created_at >= newest - timedelta(days=days))
        .where(Decision.base_commit_id.is_distinct_from(Decision.head_commit_id))
        .where(or_(Decision.watched.is_(True), Decision.detector == gate_detector))
        .group_by(Series.project, Series.gpu, Decision.watched, Decision.created_at)
        .group_by(Commit.id, Commit.sha, Commit.position, Decision.verdict)
        .order_by(Decision.created_at.desc(), Series.project, Series.gpu)
        .order_by(Commit.position, Commit.sha, Decision.verdict)
    )
    verdicts: dict[tuple[Any, ...], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    heads: dict[tuple[Any, ...], dict[str, None]] = defaultdict(dict)
    for project, gpu, watched, at, sha, verdict, decisions in session.execute(query):
        key = (project, gpu, watched, at)
        heads[key][sha] = None
        verdicts[key][verdict] += decisions
    return [
        Judgement(project, gpu, watched, at, tuple(shas), dict(verdicts[project, gpu, watched, at]))
        for (project, gpu, watched, at), shas in heads.items()
    ]


def verdicts_of_commit(session: Session, sha: str | None, *, project: str = "") -> dict[str, int]:
    """Count the decisions about a commit, against other commits, by verdict.

    sha: may be abbreviated; None: the newest commit by ancestry that was judged on the watched
    branch. project: name of an external project; empty: this repository. Returns an empty dict if
    nothing was judged.
    """
    is_verdict = Decision.base_commit_id.is_distinct_from(Decision.head_commit_id)
    judged = select(Decision.id).where(Decision.head_commit_id == Commit.id, is_verdict)
    newest = (
        select(Commit.id)
        .where(Commit.project == project)
        .order_by(Commit.position.desc().nulls_last(), Commit.id)
        .limit(1)
    )
    if sha is None:
        newest = newest.where(judged.where(Decision.watched.is_(True)).exists())
    else:
        newest = newest.where(Commit.sha.startswith(sha, autoescape=True), judged.exists())
    counts = (
        select(Decision.verdict, func.count())
        .where(Decision.head_commit_id == session.scalar(newest), is_verdict)
        .group_by(Decision.verdict)
    )
    return {row[0]: row[1] for row in session.execute(counts)}
