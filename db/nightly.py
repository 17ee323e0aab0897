"""Write the state and report of nightly runs, and change points found in retrospect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from flexq_bench.db.decisions import clean_commit_id
from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.errors import NotFoundError, RecordError
from flexq_bench.db.tables import ChangePoint, Decision, Night, Series
from flexq_bench.db.writer import stored_run_id

NIGHT_STATES = (
    "measuring",  # its run is not complete
    "comparing",  # measured; comparisons are not planned, or some have no outcome
    "done",  # every planned comparison has an outcome; judged and reported
)


@dataclass(frozen=True, slots=True)
class NightInfo:
    """A nightly run on one GPU model. key: also the idempotency key of its run."""

    key: str
    name: str
    suite: str
    gpu: str
    run: str  # uuid


def set_night(
    session: Session,
    info: NightInfo,
    state: str,
    *,
    report: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    after: str | None = None,
    at: datetime,
) -> None:
    """Insert or update a nightly run.

    report, plan None: the stored one is kept. plan: what is known of the planned comparisons
    besides their jobs. after: change only a nightly run in this state.

    Raises RecordError if the state is unknown, NotFoundError if its run is not stored.
    """
    if state not in NIGHT_STATES:
        raise RecordError(f"state is {state!r}, not one of {', '.join(NIGHT_STATES)}")
    lock_for_writing(session.connection())
    run_id = stored_run_id(session, info.run)
    values: dict[str, Any] = {"state": state, "run_id": run_id, "updated_at": at}
    if report is not None:
        values["report"] = dict(report)
    if plan is not None:
        values["plan"] = dict(plan)
    stored = update(Night).where(Night.key == info.key)
    if after is not None:
        session.execute(stored.where(Night.state == after).values(values))
        return
    changed = session.execute(stored.values(values).returning(Night.id))
    if changed.first() is None:
        row = {"key": info.key, "name": info.name, "suite": info.suite, "gpu": info.gpu}
        session.execute(insert(Night).values(row | {"report": {}} | values))


def add_change_point(
    session: Session, decision_uuid: str, sha: str, *, before: float, after: float
) -> bool:
    """Store a change point of a decision's series; False: there is one at this commit.

    sha: first commit on the new level. before, after: levels, in the unit of the series.
    Raises NotFoundError if the decision or the commit is not stored.
    """
    lock_for_writing(session.connection())
    decision = session.execute(
        select(Decision.id, Decision.series_id, Series.project)
        .join(Series, Decision.series_id == Series.id)
        .where(Decision.uuid == decision_uuid)
    ).one_or_none()
    if decision is None:
        raise NotFoundError(
            f"no decision {decision_uuid} is stored: name another database with --db"
        )
    commit_id = clean_commit_id(session, sha, decision.project)
    stored = select(ChangePoint.id).where(
        ChangePoint.series_id == decision.series_id, ChangePoint.commit_id == commit_id
    )
    if session.scalar(stored.limit(1)) is not None:
        return False
    session.execute(
        insert(ChangePoint).values(
            series_id=decision.series_id,
            commit_id=commit_id,
            decision_id=decision.id,
            before=before,
            after=after,
        )
    )
    return True


def retract_change_point(session: Session, change_point: int, reason: str, at: datetime) -> None:
    """Retract a stored change point, by its id: later results contradict it."""
    lock_for_writing(session.connection())
    values = {"retracted_at": at, "retraction_reason": reason}
    session.execute(update(ChangePoint).where(ChangePoint.id == change_point).values(values))


def restore_change_point(session: Session, change_point: int) -> None:
    """Undo the retraction of a change point, by its id."""
    lock_for_writing(session.connection())
    values = {"retracted_at": None, "retraction_reason": None}
    session.execute(update(ChangePoint).where(ChangePoint.id == change_point).values(values))
