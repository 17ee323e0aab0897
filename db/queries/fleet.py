"""Queries for the fleet: workers, devices, jobs, requests, progress of runs, offsets of GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from flexq_bench.db.errors import AmbiguousError, NotFoundError
from flexq_bench.db.leases import COMPARE, LIVE_WORKER_STATES, MEASURE
from flexq_bench.db.queries.rows import columns_of, rows_of
from flexq_bench.db.records import DeviceInfo
from flexq_bench.db.tables import (
    Commit,
    Device,
    DeviceOffset,
    Drain,
    Job,
    Measurement,
    Request,
    Run,
    Worker,
)


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
class DrainRow:
    """A host or device that gets no work; see db.tables.Drain."""

    target: str
    reason: str
    drained_by: str
    drained_at: datetime


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job of a run; None as in db.tables.Job. device: uuid of its last holder's; None: none."""

    id: int
    kind: str
    case_key: str
    repetition: int
    state: str
    attempts: int
    deaths: int
    expected_s: float | None
    worker: str | None
    lease_until: datetime | None
    reason: str
    content: dict[str, Any] | None
    device: str | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the measuring jobs of a run.

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
        select(*columns_of(WorkerRow, Worker, device=Device.uuid))
        .join(Device, Worker.device_id == Device.id)
        .order_by(Worker.heartbeat_at.desc(), Worker.id.desc())
        .limit(limit)
    )
    if live:
        query = query.where(Worker.state.in_(LIVE_WORKER_STATES))
    return rows_of(session, WorkerRow, query)


def drains(session: Session) -> list[DrainRow]:
    """Return the hosts and devices that get no work, latest first."""
    query = select(*columns_of(DrainRow, Drain)).order_by(Drain.drained_at.desc())
    return rows_of(session, DrainRow, query)


def jobs_of(
    session: Session, run_uuid: str, *, states: Sequence[str] = (), kind: str = MEASURE
) -> list[JobRow]:
    """Return the jobs of one kind of a run in plan order. states: only these; empty: all."""
    query = _jobs().where(Run.uuid == run_uuid, Job.kind == kind).order_by(Job.id)
    if states:
        query = query.where(Job.state.in_(list(states)))
    return rows_of(session, JobRow, query)


def comparison_outcomes(session: Session, run_uuid: str) -> dict[int, dict[str, Any]]:
    """Return device and evidence of the run's comparisons that have a result, by job."""
    query = (
        select(Job.id, Job.outcome)
        .join(Run, Job.run_id == Run.id)
        .where(Run.uuid == run_uuid, Job.kind == COMPARE, Job.state == "done")
        .order_by(Job.id)
    )
    return {row.id: row.outcome for row in session.execute(query)}


def comparison_states(session: Session, run_uuids: Sequence[str]) -> dict[str, dict[str, int]]:
    """Count the jobs that compare by state, for each of these runs that has some."""
    query = (
        select(Run.uuid, Job.state, func.count())
        .join(Run, Job.run_id == Run.id)
        .where(Run.uuid.in_(list(run_uuids)), Job.kind == COMPARE)
        .group_by(Run.uuid, Job.state)
        .order_by(Job.state)
    )
    states: dict[str, dict[str, int]] = defaultdict(dict)
    for run, state, count in session.execute(query):
        states[run][state] = count
    return dict(states)


def _jobs() -> Select[Any]:
    # Outer joins: the last holder of a job of an earlier version may not be stored.
    return (
        select(*columns_of(JobRow, Job, device=Device.uuid))
        .join(Run, Job.run_id == Run.id)
        .outerjoin(Worker, Worker.uuid == Job.worker)
        .outerjoin(Device, Device.id == Worker.device_id)
    )


def quarantined_jobs(session: Session, *, limit: int | None = None) -> list[tuple[str, JobRow]]:
    """Return jobs on which too many workers died, each with its run's uuid, newest first."""
    query = (
        _jobs()
        .add_columns(Run.uuid)
        .where(Job.state == "quarantined")
        .order_by(Job.id.desc())
        .limit(limit)
    )
    return [(run, JobRow(*values)) for *values, run in session.execute(query)]


def progress(
    session: Session, *, run_uuids: Sequence[str] | None = None, limit: int | None = None
) -> list[Progress]:
    """Return the progress of runs with jobs, newest first.

    run_uuids None: all runs that are not finished.
    """
    having_jobs = select(Job.run_id).where(Job.kind == MEASURE).distinct()
    query = (
        select(Run.id, *columns_of(Progress, Run, run=Run.uuid, commit=Commit.sha))
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
        .where(Job.run_id.in_([row["id"] for row in rows]), Job.kind == MEASURE)
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
    query = (
        select(Measurement.case_key, Measurement.median_us, *columns_of(DeviceInfo, Device))
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
        (case, DeviceInfo(*settings), median) for case, median, *settings in session.execute(query)
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
            *columns_of(OffsetRow, DeviceOffset, run=Run.uuid, device=Device.uuid, gpu=Device.sku)
        )
        .join(Run, DeviceOffset.run_id == Run.id)
        .join(Device, DeviceOffset.device_id == Device.id)
        .order_by(DeviceOffset.computed_at.desc(), DeviceOffset.id.desc())
        .limit(limit)
    )
    if gpu is not None:
        query = query.where(Device.sku == gpu)
    return rows_of(session, OffsetRow, query)


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device with one set of settings; None as in db.tables.Device.

    last_seen: last heartbeat of a worker on it; None: no worker ran on it.
    """

    uuid: str
    sku: str
    backend: str
    compute_capability: str | None
    memory_bytes: int | None
    power_limit_w: float | None
    ecc: bool | None
    mig: bool | None
    vbios: str | None
    last_seen: datetime | None


def devices(session: Session, *, limit: int | None = None) -> list[DeviceRow]:
    """Return all devices by last_seen, newest first; devices without one come last."""
    seen = (
        select(Worker.device_id, func.max(Worker.heartbeat_at).label("last_seen"))
        .group_by(Worker.device_id)
        .subquery()
    )
    query = (
        select(*columns_of(DeviceRow, Device, last_seen=seen.c.last_seen))
        .outerjoin(seen, seen.c.device_id == Device.id)
        .order_by(seen.c.last_seen.desc().nulls_last(), Device.sku, Device.uuid, Device.id)
        .limit(limit)
    )
    return rows_of(session, DeviceRow, query)


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request and its state; None as in db.tables.Request. run: uuid of its run."""

    uuid: str
    kind: str
    content: dict[str, Any]
    requester: str
    gpu: str
    state: str
    cases: int
    expected_s: float | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    server: str | None
    run: str | None
    detail: str


def requests(
    session: Session,
    *,
    states: Sequence[str] = (),
    requester: str | None = None,
    requester_prefix: str = "",
    limit: int | None = None,
) -> list[RequestRow]:
    """Return requests, newest first. states: only these; empty: all.

    requester: only this requester's. requester_prefix: only names with this prefix.
    """
    query = _stored().order_by(Request.created_at.desc(), Request.id.desc()).limit(limit)
    if states:
        query = query.where(Request.state.in_(list(states)))
    if requester is not None:
        query = query.where(Request.requester == requester)
    if requester_prefix:
        query = query.where(Request.requester.startswith(requester_prefix, autoescape=True))
    return rows_of(session, RequestRow, query)


def request_by_uuid_prefix(session: Session, prefix: str) -> RequestRow:
    """Return the request whose uuid begins with `prefix`. Raises NotFoundError, AmbiguousError."""
    begins = Request.uuid.startswith(prefix, autoescape=True)
    rows = rows_of(session, RequestRow, _stored().where(begins).limit(2))
    if not rows:
        raise NotFoundError(f"no request begins with {prefix!r}: check it, or name another --db")
    if len(rows) > 1:
        raise AmbiguousError(f"several requests begin with {prefix!r}: write more of it")
    return rows[0]


def _stored() -> Select[Any]:
    columns = columns_of(RequestRow, Request, run=Run.uuid)
    return select(*columns).outerjoin(Run, Request.run_id == Run.id)


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


def capability_of(session: Session, gpu: str) -> tuple[int, int] | None:
    """Return the compute capability of a SKU; None: no such device is stored, or it is a CPU."""
    text = session.scalar(
        select(Device.compute_capability).where(Device.sku == gpu).order_by(Device.id.desc())
    )
    if text is None:
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor)
