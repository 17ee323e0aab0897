"""Queries for the fleet: workers, jobs, progress of runs, time offsets of GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from flexq_bench.db.fleet import LIVE_WORKER_STATES
from flexq_bench.db.records import DeviceInfo
from flexq_bench.db.tables import Commit, Device, DeviceOffset, Job, Measurement, Run, Worker


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker and its current state; None as in db.tables.Worker."""

    uuid: str
    host: str
    pid: int
    gpu: str
    device: str  # uuid
    state: str
    detail: str
    case_key: str | None
    started_at: datetime
    heartbeat_at: datetime
    lease_until: datetime | None
    temperature_c: float | None
    finished: int
    measuring_s: float


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job of a run; None as in db.tables.Job."""

    id: int
    case_key: str
    repetition: int
    state: str
    attempts: int
    deaths: int
    expected_s: float | None
    worker: str | None
    lease_until: datetime | None
    reason: str


_JOB = tuple(Job.__table__.columns[name] for name in JobRow.__slots__)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the jobs of a run.

    states: number of jobs by state. expected_s: estimated seconds for the open jobs on one GPU;
    unknown: number of open jobs without an estimate.
    """

    run: str  # uuid
    suite: str
    trigger: str
    status: str
    commit: str
    created_at: datetime
    states: dict[str, int]
    expected_s: float
    unknown: int

    @property
    def total(self) -> int:
        return sum(self.states.values())

    @property
    def open(self) -> int:
        return self.states.get("queued", 0) + self.states.get("leased", 0)


@dataclass(frozen=True, slots=True)
class OffsetRow:
    """ln(a GPU's time / the mean over GPUs of its SKU) in a run, with its 95 % interval."""

    run: str  # uuid
    device: str  # uuid
    gpu: str  # SKU
    cases: int
    log_offset: float
    low: float
    high: float
    computed_at: datetime


def workers(session: Session, *, live: bool = False, limit: int | None = None) -> list[WorkerRow]:
    """Return the workers, latest heartbeat first. live: only those that have not ended."""
    query = (
        select(
            Worker.uuid,
            Worker.host,
            Worker.pid,
            Worker.gpu,
            Device.uuid.label("device"),
            Worker.state,
            Worker.detail,
            Worker.case_key,
            Worker.started_at,
            Worker.heartbeat_at,
            Worker.lease_until,
            Worker.temperature_c,
            Worker.finished,
            Worker.measuring_s,
        )
        .join(Device, Worker.device_id == Device.id)
        .order_by(Worker.heartbeat_at.desc(), Worker.id.desc())
        .limit(limit)
    )
    if live:
        query = query.where(Worker.state.in_(LIVE_WORKER_STATES))
    return [WorkerRow(**row) for row in session.execute(query).mappings()]


def jobs_of(session: Session, run_uuid: str, *, states: Sequence[str] = ()) -> list[JobRow]:
    """Return the jobs of a run in plan order. states: only these; empty: all."""
    query = (
        select(*_JOB).join(Run, Job.run_id == Run.id).where(Run.uuid == run_uuid).order_by(Job.id)
    )
    if states:
        query = query.where(Job.state.in_(list(states)))
    return [JobRow(**row) for row in session.execute(query).mappings()]


def quarantined_jobs(session: Session, *, limit: int | None = None) -> list[tuple[str, JobRow]]:
    """Return jobs on which too many workers died, each with its run's uuid, newest first."""
    query = (
        select(*_JOB, Run.uuid.label("run"))
        .join(Run, Job.run_id == Run.id)
        .where(Job.state == "quarantined")
        .order_by(Job.id.desc())
        .limit(limit)
    )
    rows = session.execute(query).mappings()
    return [
        (row["run"], JobRow(**{name: row[name] for name in row if name != "run"})) for row in rows
    ]


def progress(
    session: Session, *, run_uuids: Sequence[str] | None = None, limit: int | None = None
) -> list[Progress]:
    """Return the progress of runs with jobs, newest first.

    run_uuids None: all runs that are not finished.
    """
    having_jobs = select(Job.run_id).distinct()
    query = (
        select(
            Run.id,
            Run.uuid.label("run"),
            Run.suite,
            Run.trigger,
            Run.status,
            Commit.sha.label("commit"),
            Run.created_at,
        )
        .join(Commit, Run.commit_id == Commit.id)
        .where(Run.id.in_(having_jobs))
        .order_by(Run.created_at.desc(), Run.id.desc())
        .limit(limit)
    )
    if run_uuids is None:
        query = query.where(Run.status.in_(("running", "interrupted")))
    else:
        query = query.where(Run.uuid.in_(list(run_uuids)))
    rows = session.execute(query).mappings().all()
    states: dict[int, dict[str, int]] = defaultdict(dict)
    expected: dict[int, float] = defaultdict(float)
    unknown: dict[int, int] = defaultdict(int)
    counted = (
        select(
            Job.run_id,
            Job.state,
            func.count(),
            func.sum(Job.expected_s),
            func.count(Job.expected_s),
        )
        .where(Job.run_id.in_([row["id"] for row in rows]))
        .group_by(Job.run_id, Job.state)
        .order_by(Job.state)
    )
    for run_id, state, count, seconds, known in session.execute(counted):
        states[run_id][state] = count
        if state in ("queued", "leased"):
            expected[run_id] += float(seconds or 0)
            unknown[run_id] += count - known
    return [
        Progress(
            **{name: row[name] for name in row if name != "id"},
            states=states[row["id"]],
            expected_s=expected[row["id"]],
            unknown=unknown[row["id"]],
        )
        for row in rows
    ]


def device_medians(session: Session, run_uuid: str) -> list[tuple[str, DeviceInfo, float]]:
    """Return case, device and median (us) of each correct, timed result of a run."""
    columns = [Device.__table__.columns[field.name] for field in fields(DeviceInfo)]
    query = (
        select(Measurement.case_key, Measurement.median_us, *columns)
        .join(Run, Measurement.run_id == Run.id)
        .join(Device, Measurement.device_id == Device.id)
        .where(
            Run.uuid == run_uuid,
            Measurement.status.in_(("ok", "noisy")),
            Measurement.median_us.is_not(None),
        )
        .order_by(Measurement.id)
    )
    return [
        (row["case_key"], DeviceInfo(**{c.name: row[c.name] for c in columns}), row["median_us"])
        for row in session.execute(query).mappings()
    ]


def runs_on_several_devices(session: Session, *, among: int = 50) -> list[tuple[str, datetime]]:
    """Return uuid and start of runs measured by several devices of one SKU, newest first.

    among: number of newest runs to search.
    """
    newest = select(Run.id).order_by(Run.created_at.desc(), Run.id.desc()).limit(among).subquery()
    query = (
        select(Run.uuid, Run.created_at)
        .join(Measurement, Measurement.run_id == Run.id)
        .join(Device, Measurement.device_id == Device.id)
        .where(Run.id.in_(select(newest.c.id)))
        .group_by(Run.id, Run.uuid, Run.created_at, Device.sku)
        .having(func.count(Device.uuid.distinct()) > 1)
        .order_by(Run.created_at.desc(), Run.id.desc())
    )
    return list(dict.fromkeys((row.uuid, row.created_at) for row in session.execute(query)))


def device_offsets(
    session: Session, *, gpu: str | None = None, limit: int | None = None
) -> list[OffsetRow]:
    """Return the time offsets of single GPUs in runs, newest first. gpu: only of this SKU."""
    query = (
        select(
            Run.uuid.label("run"),
            Device.uuid.label("device"),
            Device.sku.label("gpu"),
            DeviceOffset.cases,
            DeviceOffset.log_offset,
            DeviceOffset.low,
            DeviceOffset.high,
            DeviceOffset.computed_at,
        )
        .join(Run, DeviceOffset.run_id == Run.id)
        .join(Device, DeviceOffset.device_id == Device.id)
        .order_by(DeviceOffset.computed_at.desc(), DeviceOffset.id.desc())
        .limit(limit)
    )
    if gpu is not None:
        query = query.where(Device.sku == gpu)
    return [OffsetRow(**row) for row in session.execute(query).mappings()]
