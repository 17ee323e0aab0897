"""Write the fleet's state: workers, jobs, and the leases of workers on jobs.

A job measures a case or compares two commits. Each call takes the writer's lock, like db.store. A
job becomes done in the transaction that stores its result: whichever process is killed, no job has
two results, and no result is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, delete, exists, insert, or_, select, update
from sqlalchemy.orm import Session

from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.encoding import canonical
from flexq_bench.db.leases import (
    COMPARE,
    JOB_LEASES,
    LIVE_WORKER_STATES,
    MEASURE,
    OPEN_JOB_STATES,
)
from flexq_bench.db.records import DeviceInfo, Record
from flexq_bench.db.tables import DeviceOffset, Drain, Job, Measurement, Worker
from flexq_bench.db.writer import Writer, stored_run_id


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job to add. expected_s None: no similar case was measured before.

    reason: why no device can run it; empty: a device can. content: commits and cases to compare;
    None: the job measures a case.
    """

    case_key: str
    repetition: int = 1
    expected_s: float | None = None
    reason: str = ""
    content: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ComparisonOutcome:
    """The end of a job that compares. state: done, refused or quarantined; reason: of the others.

    outcome: device and evidence; None: there are none.
    """

    state: str
    reason: str = ""
    outcome: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A measuring process. uuid: of the process, so a restarted worker has a new one."""

    uuid: str
    host: str
    pid: int
    device: DeviceInfo
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat of a worker. case_key: of its job; None: it is idle. temperature_c None: unknown.

    finished: jobs finished since its start; measuring_s: seconds spent in cases.
    job: the job it measures, whose lease is renewed; None: it is idle.
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
    """Add the jobs that the run does not have, and return their number. Raises NotFoundError."""
    lock_for_writing(session.connection())
    run_id = stored_run_id(session, run_uuid)
    stored = session.execute(select(Job.case_key, Job.repetition).where(Job.run_id == run_id))
    known = {(key, repetition) for key, repetition in stored}
    rows = [
        {
            "run_id": run_id,
            "kind": MEASURE if job.content is None else COMPARE,
            "case_key": job.case_key,
            "repetition": job.repetition,
            "state": "no-device" if job.reason else "queued",
            "attempts": 0,
            "deaths": 0,
            "expected_s": job.expected_s,
            "reason": job.reason,
            "content": job.content,
        }
        for job in jobs
        if (job.case_key, job.repetition) not in known
    ]
    if rows:
        session.execute(insert(Job), rows)
    return len(rows)


def reopen_jobs(session: Session, run_uuid: str, reasons: Mapping[str, str]) -> None:
    """Update the measuring jobs without a lease to the devices and results there are now.

    reasons: case key -> why no device can run it. A job whose case is not in it is queued again;
    one whose case already has a measurement becomes done. Raises NotFoundError.
    """
    lock_for_writing(session.connection())
    run_id = stored_run_id(session, run_uuid)
    measured = exists().where(
        Measurement.run_id == run_id, Measurement.case_key == Job.case_key, Job.repetition == 1
    )
    idle = Job.run_id == run_id, Job.kind == MEASURE, Job.state.in_(("queued", "no-device"))
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


def reopen_comparisons(session: Session, run_uuid: str) -> None:
    """Queue the run's comparisons that had no device. Raises NotFoundError."""
    lock_for_writing(session.connection())
    session.execute(
        update(Job)
        .where(
            Job.run_id == stored_run_id(session, run_uuid),
            Job.kind == COMPARE,
            Job.state == "no-device",
        )
        .values(state="queued", reason="")
    )


def abandon_jobs(session: Session, run_uuid: str, reason: str) -> None:
    """Set the queued jobs of a run to no-device. Raises NotFoundError if the run is not stored."""
    lock_for_writing(session.connection())
    session.execute(
        update(Job)
        .where(Job.run_id == stored_run_id(session, run_uuid), Job.state == "queued")
        .values(state="no-device", reason=reason)
    )


def claim_jobs(
    session: Session,
    claims: Mapping[int, str],
    *,
    until: datetime,
    at: datetime,
    own_workers: Collection[str] = (),
) -> dict[int, int]:
    """Lease jobs to workers; return the number of the attempt by job.

    claims: job -> uuid of the worker. own_workers: workers of the caller that measure none of
    these jobs: a lease they have is from a transaction whose commit was not confirmed, and is
    ignored. Jobs that are done, or leased to another worker until a later time, are not in the
    result.
    """
    lock_for_writing(session.connection())
    unconfirmed = (Job.state == JOB_LEASES.leased_state) & Job.worker.in_(list(own_workers))
    free = session.execute(
        select(Job.id, Job.attempts).where(
            Job.id.in_(list(claims)), or_(JOB_LEASES.is_free(at, until - at), unconfirmed)
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
    """Store the records of open jobs and set their state; return the ids of these jobs.

    The first result of a job is kept, even if its lease had expired; later ones are ignored. state:
    `done` or `quarantined`. Raises like add_record.
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


def finish_comparisons(session: Session, outcomes: Mapping[int, ComparisonOutcome]) -> set[int]:
    """Store the outcomes of open jobs that compare; return the ids of these jobs.

    As with results, the first outcome of a job is kept.
    """
    lock_for_writing(session.connection())
    open_jobs = set(
        session.scalars(
            select(Job.id).where(Job.id.in_(list(outcomes)), Job.state.in_(OPEN_JOB_STATES))
        )
    )
    for job in open_jobs:
        end = outcomes[job]
        values = {"state": end.state, "reason": end.reason, "outcome": end.outcome}
        session.execute(update(Job).where(Job.id == job).values(lease_until=None, **values))
    return open_jobs


def return_jobs(session: Session, reasons: Mapping[int, str], *, death: bool) -> dict[int, int]:
    """Queue leased jobs again; return the number of workers that died on each, by job.

    reasons: job -> reason. death: the worker died while it held the job; False: the job is not the
    cause (for example a node was lost).
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
    """Add a worker with its device and environment; no effect if it is stored."""
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
    """Store heartbeats, and renew the leases on the jobs that these workers measure."""
    if not beats:
        return
    lock_for_writing(session.connection())
    uuids = [heartbeat.worker for heartbeat in beats]
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
            "which": heartbeat.worker,
            "now": "idle" if heartbeat.case_key is None else "measuring",
            "until": None if heartbeat.case_key is None else until,
            "current": heartbeat.case_key,
            "celsius": heartbeat.temperature_c,
            "count": heartbeat.finished,
            "seconds": heartbeat.measuring_s,
        }
        for heartbeat in beats
    ]
    session.connection().execute(statement, rows)
    jobs = [heartbeat.job for heartbeat in beats if heartbeat.job is not None]
    JOB_LEASES.renew(session, uuids, Job.id.in_(jobs), until=until, heartbeat_at=at)


def end_worker(session: Session, uuid: str, *, detail: str = "", at: datetime) -> None:
    """Mark a worker as ended. detail: why it was lost; empty: it stopped normally."""
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
    """Mark workers without a heartbeat since `silent_since` as lost; return their number."""
    lock_for_writing(session.connection())
    silent = session.scalars(
        select(Worker.id).where(
            Worker.state.in_(LIVE_WORKER_STATES), Worker.heartbeat_at < silent_since
        )
    ).all()
    values = {
        "state": "lost",
        "detail": "no heartbeat: its coordinator has ended",
        "case_key": None,
        "lease_until": None,
    }
    session.execute(update(Worker).where(Worker.id.in_(silent)).values(values))
    return len(silent)


def drain(session: Session, target: str, *, reason: str, person: str, at: datetime) -> None:
    """Give a host, by name, or a device, by uuid, no more work; the newest reason is stored."""
    lock_for_writing(session.connection())
    end_drain(session, target)
    values = {"target": target, "reason": reason, "drained_by": person, "drained_at": at}
    session.execute(insert(Drain).values(**values))


def end_drain(session: Session, target: str) -> None:
    """Give a host or device work again; no effect if it is not drained."""
    lock_for_writing(session.connection())
    session.execute(delete(Drain).where(Drain.target == target))


def add_offsets(
    session: Session, run_uuid: str, offsets: Iterable[OffsetInfo], *, at: datetime
) -> None:
    """Store the device offsets of a run; they replace those stored before it was resumed.

    Raises NotFoundError if the run is not stored.
    """
    writer = Writer(session)
    run_id = stored_run_id(session, run_uuid)
    for offset in offsets:
        values = {name: getattr(offset, name) for name in ("cases", "log_offset", "low", "high")}
        values["computed_at"] = at
        key = {"run_id": run_id, "device_id": writer.device(offset.device)}
        changed = session.execute(
            update(DeviceOffset).filter_by(**key).values(values).returning(DeviceOffset.id)
        )
        if changed.first() is None:
            session.execute(insert(DeviceOffset).values(**key, **values))
