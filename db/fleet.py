"""Writing the fleet's state: workers, and the jobs that they hold leases on.

Each call takes the writer's lock, as db.store. A job is done when its record is stored, in the
same transaction: whoever is killed at any moment, a job never has two results, and none is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import bindparam, exists, insert, or_, select, update
from sqlalchemy.orm import Session

from db.encoding import canonical
from db.errors import NotFoundError
from db.leases import JOB_LEASES
from db.locking import lock_for_writing
from db.records import DeviceInfo, Record
from db.tables import DeviceOffset, Job, Measurement, Run, Worker
from db.writer import Writer

# What a run waits for. Every other state is the end of a job: done; quarantined, it ended too many
# workers; no-device, no GPU that could run it was there.
OPEN_JOB_STATES = ("queued", "leased")
LIVE_WORKER_STATES = ("idle", "measuring")


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job to be. expected_s None: nothing like it was ever measured.

    reason: why no device can run it; empty: one can.
    """

    case_key: str
    repetition: int = 1
    expected_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A process that measures. uuid: of the process, so a replacement is another worker."""

    uuid: str
    host: str
    pid: int
    device: DeviceInfo
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life. case_key None: it measures nothing. temperature_c None: not known.

    finished: jobs brought to an end since its start; measuring_s: seconds spent in cases.
    job: the one it measures, whose lease is renewed; None: it has none.
    """

    worker: str
    case_key: str | None
    temperature_c: float | None
    finished: int
    measuring_s: float
    job: int | None = None


@dataclass(frozen=True, slots=True)
class OffsetInfo:
    """ln(a GPU's time / the mean over GPUs of its SKU), with its 95 % interval."""

    device: DeviceInfo
    cases: int
    log_offset: float
    low: float
    high: float


def add_jobs(session: Session, run_uuid: str, jobs: Iterable[JobInfo]) -> int:
    """Add the jobs that the run does not have, and say how many. Raises NotFoundError."""
    lock_for_writing(session.connection())
    run_id = _run_id(session, run_uuid)
    stored = session.execute(select(Job.case_key, Job.repetition).where(Job.run_id == run_id))
    known = {(key, repetition) for key, repetition in stored}
    rows = [
        {
            "run_id": run_id,
            "case_key": job.case_key,
            "repetition": job.repetition,
            "state": "no-device" if job.reason else "queued",
            "attempts": 0,
            "deaths": 0,
            "expected_s": job.expected_s,
            "reason": job.reason,
        }
        for job in jobs
        if (job.case_key, job.repetition) not in known
    ]
    if rows:
        session.execute(insert(Job), rows)
    return len(rows)


def reopen_jobs(session: Session, run_uuid: str, reasons: Mapping[str, str]) -> None:
    """Set the jobs that nobody holds by what is there now.

    reasons: by case, why no device can run it. A job that has none any more is queued again; one
    whose case was measured without the fleet is done. Raises NotFoundError.
    """
    lock_for_writing(session.connection())
    run_id = _run_id(session, run_uuid)
    measured = exists().where(
        Measurement.run_id == run_id, Measurement.case_key == Job.case_key, Job.repetition == 1
    )
    idle = Job.run_id == run_id, Job.state.in_(("queued", "no-device"))
    session.execute(update(Job).where(*idle, measured).values(state="done"))
    waiting = session.execute(select(Job.id, Job.case_key).where(*idle)).all()
    rows = [
        {
            "job": row.id,
            "state": "no-device" if reasons.get(row.case_key) else "queued",
            "reason": reasons.get(row.case_key, ""),
        }
        for row in waiting
    ]
    if rows:
        statement = (
            update(Job)
            .where(Job.id == bindparam("job"))
            .values(state=bindparam("state"), reason=bindparam("reason"))
        )
        session.connection().execute(statement, rows)


def abandon_jobs(session: Session, run_uuid: str, reason: str) -> None:
    """No device is there for what waits of a run. Raises NotFoundError if it is not stored."""
    lock_for_writing(session.connection())
    session.execute(
        update(Job)
        .where(Job.run_id == _run_id(session, run_uuid), Job.state == "queued")
        .values(state="no-device", reason=reason)
    )


def claim_jobs(
    session: Session,
    claims: Mapping[int, str],
    *,
    until: datetime,
    at: datetime,
    ours: Collection[str] = (),
) -> dict[int, int]:
    """Lease jobs to workers, and say which attempt it is of each that was free.

    claims: the worker's uuid by job. ours: the caller's workers, of which it knows that none
    measures these jobs: a lease of theirs was given in a transaction whose end it never heard of.
    A job that is done, or that anybody else holds a lease on which has not run out, is left out of
    the answer.
    """
    lock_for_writing(session.connection())
    forgotten = (Job.state == JOB_LEASES.held) & Job.worker.in_(list(ours))
    free = session.execute(
        select(Job.id, Job.attempts).where(
            Job.id.in_(list(claims)), or_(JOB_LEASES.is_free(at), forgotten)
        )
    ).all()
    JOB_LEASES.claim(
        session,
        {row.id: claims[row.id] for row in free},
        until=until,
        attempts=Job.attempts + 1,
        heartbeat_at=at,
    )
    return {row.id: row.attempts + 1 for row in free}


def finish_jobs(
    session: Session, results: Mapping[int, Record], *, state: str = "done"
) -> set[int]:
    """Store the records of jobs that have none yet and end these jobs; the ids of both.

    A result that comes after another one of the same job changes nothing: the first is kept, also
    if its lease had run out. state: `done`, or `quarantined` for records that say so.
    Raises as add_record.
    """
    writer = Writer(session)
    open_jobs = set(
        session.scalars(
            select(Job.id).where(Job.id.in_(list(results)), Job.state.in_(OPEN_JOB_STATES))
        )
    )
    writer.add_all(canonical(results[job]) for job in results if job in open_jobs)
    session.execute(update(Job).where(Job.id.in_(open_jobs)).values(state=state, lease_until=None))
    return open_jobs


def return_jobs(session: Session, reasons: Mapping[int, str], *, death: bool) -> dict[int, int]:
    """Put leased jobs back; how many workers each has ended, by job.

    death: the worker ended while it held the job; else the job is not to blame (a node was lost).
    """
    lock_for_writing(session.connection())
    statement = (
        update(Job)
        .where(Job.id == bindparam("job"), Job.state == "leased")
        .values(
            state="queued",
            lease_until=None,
            deaths=Job.deaths + int(death),
            reason=bindparam("reason"),
        )
    )
    rows = [{"job": job, "reason": reason} for job, reason in reasons.items()]
    if rows:
        session.connection().execute(statement, rows)
    deaths = session.execute(select(Job.id, Job.deaths).where(Job.id.in_(list(reasons))))
    return {row.id: row.deaths for row in deaths}


def register_worker(session: Session, info: WorkerInfo, *, at: datetime) -> None:
    """Add a worker with its device and its environment."""
    writer = Writer(session)
    if session.scalar(select(Worker.id).where(Worker.uuid == info.uuid)) is not None:
        return
    row = {
        "uuid": info.uuid,
        "host": info.host,
        "pid": info.pid,
        "gpu": info.device.sku,
        "device_id": writer.device(info.device),
        "environment_id": writer.environment(info.environment),
        "state": "idle",
        "detail": "",
        "started_at": at,
        "heartbeat_at": at,
        "finished": 0,
        "measuring_s": 0.0,
    }
    session.execute(insert(Worker).values(row))


def beat(session: Session, beats: Sequence[Beat], *, until: datetime, at: datetime) -> None:
    """Keep signs of life, and renew the leases on the jobs that these workers measure."""
    if not beats:
        return
    lock_for_writing(session.connection())
    uuids = [one.worker for one in beats]
    statement = (
        update(Worker)
        .where(Worker.uuid == bindparam("which"))
        .values(
            state=bindparam("now"),
            case_key=bindparam("current"),
            temperature_c=bindparam("celsius"),
            finished=bindparam("count"),
            measuring_s=bindparam("seconds"),
            heartbeat_at=at,
            lease_until=bindparam("until"),
        )
    )
    rows = [
        {
            "which": one.worker,
            "now": "idle" if one.case_key is None else "measuring",
            "until": None if one.case_key is None else until,
            "current": one.case_key,
            "celsius": one.temperature_c,
            "count": one.finished,
            "seconds": one.measuring_s,
        }
        for one in beats
    ]
    session.connection().execute(statement, rows)
    held = [one.job for one in beats if one.job is not None]
    JOB_LEASES.renew(session, uuids, Job.id.in_(held), until=until, heartbeat_at=at)


def end_worker(session: Session, uuid: str, *, detail: str = "", at: datetime) -> None:
    """A worker is no more. detail: why it is lost; empty: it stopped as it should."""
    lock_for_writing(session.connection())
    session.execute(
        update(Worker)
        .where(Worker.uuid == uuid)
        .values(
            state="lost" if detail else "stopped",
            detail=detail,
            case_key=None,
            lease_until=None,
            heartbeat_at=at,
        )
    )


def forget_silent_workers(session: Session, *, silent_since: datetime) -> int:
    """Mark as lost the workers that nobody has heard of since; how many."""
    lock_for_writing(session.connection())
    silent = session.scalars(
        select(Worker.id).where(
            Worker.state.in_(LIVE_WORKER_STATES), Worker.heartbeat_at < silent_since
        )
    ).all()
    values = {
        "state": "lost",
        "detail": "whoever started it ended without saying so",
        "case_key": None,
        "lease_until": None,
    }
    session.execute(update(Worker).where(Worker.id.in_(silent)).values(values))
    return len(silent)


def add_offsets(
    session: Session, run_uuid: str, offsets: Iterable[OffsetInfo], *, at: datetime
) -> None:
    """Store the offsets that a run shows, in place of those it showed before it went on.

    Raises NotFoundError if the run is not stored.
    """
    writer = Writer(session)
    run_id = _run_id(session, run_uuid)
    for one in offsets:
        values = {
            "cases": one.cases,
            "log_offset": one.log_offset,
            "low": one.low,
            "high": one.high,
            "computed_at": at,
        }
        same = {"run_id": run_id, "device_id": writer.device(one.device)}
        changed = session.execute(
            update(DeviceOffset).filter_by(**same).values(values).returning(DeviceOffset.id)
        )
        if changed.first() is None:
            session.execute(insert(DeviceOffset).values(**same, **values))


def _run_id(session: Session, run_uuid: str) -> int:
    run_id = session.scalar(select(Run.id).where(Run.uuid == run_uuid))
    if run_id is None:
        raise NotFoundError(f"no run {run_uuid} is stored: name another database with --db")
    return run_id
