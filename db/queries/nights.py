"""Queries for the latest nightly run: outcomes of cases, and verdicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from flexq_bench.db.queries.filters import is_latest_attempt
from flexq_bench.db.tables import Commit, Decision, Measurement, Run, Series


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
class NightRow:
    """The last verdicts on one GPU model.

    heads: shas of the judged commits. verdicts: number of decisions by verdict.
    """

    gpu: str
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
    return [OutcomeRow(**row) for row in session.execute(query).mappings()]


def latest_nights(session: Session) -> list[NightRow]:
    """Return the last stored set of verdicts per GPU model, ordered by GPU name.

    Includes only decisions on the watched branch of this repository. Comparisons of a commit with
    itself are left out.
    """
    is_verdict = (
        Series.project == "",
        Decision.watched.is_(True),
        Decision.base_commit_id.is_distinct_from(Decision.head_commit_id),
    )
    # One index lookup per series: a GPU model has few series, and many decisions.
    last = (
        select(Decision.created_at)
        .where(Decision.series_id == Series.id, *is_verdict)
        .order_by(Decision.created_at.desc())
        .limit(1)
        .correlate(Series)
        .scalar_subquery()
    )
    by_series = select(Series.gpu, last.label("at")).subquery()
    latest = (
        select(by_series.c.gpu, func.max(by_series.c.at))
        .where(by_series.c.at.is_not(None))
        .group_by(by_series.c.gpu)
        .order_by(by_series.c.gpu)
    )
    nights = []
    for gpu, at in session.execute(latest).all():
        verdicts: dict[str, int] = defaultdict(int)
        heads: dict[str, None] = {}
        for sha, verdict, count in session.execute(
            select(Commit.sha, Decision.verdict, func.count())
            .select_from(Decision)
            .join(Series, Decision.series_id == Series.id)
            .join(Commit, Decision.head_commit_id == Commit.id)
            .where(*is_verdict, Series.gpu == gpu, Decision.created_at == at)
            .group_by(Commit.sha, Commit.topo_order, Decision.verdict)
            .order_by(Commit.topo_order, Commit.sha, Decision.verdict)
        ):
            heads[sha] = None
            verdicts[verdict] += count
        nights.append(NightRow(gpu, at, tuple(heads), dict(verdicts)))
    return nights


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
        .order_by(Commit.topo_order.desc().nulls_last(), Commit.id)
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
