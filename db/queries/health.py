"""Queries for health monitoring: times of newest results, counts of runs, jobs and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from flexq_bench.db.tables import Job, Measurement, Request, Run


@dataclass(frozen=True, slots=True)
class Health:
    """Counts for health monitoring.

    runs: by status. quarantined, queued_jobs: jobs. lease_until: earliest expiry of a job's lease;
    None: no job is leased.
    """

    runs: dict[str, int]
    quarantined: int
    queued_jobs: int
    queued_requests: int
    lease_until: datetime | None


def health(session: Session) -> Health:
    """Count runs, and waiting jobs and requests."""
    run_rows = session.execute(
        select(Run.status, func.count().label("runs")).group_by(Run.status)
    ).all()
    job_rows = session.execute(
        select(Job.state, func.count(), func.min(Job.lease_until))
        .where(Job.state.in_(("queued", "leased", "quarantined")))
        .group_by(Job.state)
    ).all()
    jobs = {state: count for state, count, _ in job_rows}
    waiting = select(func.count()).where(Request.state == "queued")
    return Health(
        {row.status: row.runs for row in run_rows},
        jobs.get("quarantined", 0),
        jobs.get("queued", 0),
        session.scalar(waiting) or 0,
        next((until for state, _, until in job_rows if state == "leased"), None),
    )


def last_results(session: Session, run_uuids: Sequence[str]) -> dict[str, datetime]:
    """Return the time of each run's newest result; runs without a result are left out."""
    newest = (
        select(Run.uuid, func.max(Measurement.created_at).label("newest"))
        .join(Measurement, Measurement.run_id == Run.id)
        .where(Run.uuid.in_(list(run_uuids)))
        .group_by(Run.uuid)
    )
    return {row.uuid: row.newest for row in session.execute(newest)}
