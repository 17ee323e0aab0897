"""Queries for runs, their plans and their completeness."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from flexq_bench.db.dialects import database_time
from flexq_bench.db.errors import AmbiguousError, NotFoundError
from flexq_bench.db.leases import JOB_LEASES, UNFINISHED_JOB_STATES
from flexq_bench.db.queries.filters import Filters, is_latest_attempt
from flexq_bench.db.queries.pages import Listing, Page, count_of
from flexq_bench.db.queries.results import SCHEDULED
from flexq_bench.db.queries.rows import columns_of, rows_of
from flexq_bench.db.records import RunInfo, RunOwner
from flexq_bench.db.tables import Commit, Job, Measurement, PlannedCase, Run, Series

_MAX_NAMED = 5  # uuids listed in an AmbiguousError


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run and its completeness.

    received: cases with a result of any status, counted per GPU model. missing: planned cases
    without one. statuses: number of received cases by the status of the last measurement.
    """

    uuid: str
    suite: str
    trigger: str
    status: str
    created_at: datetime
    finished_at: datetime | None  # None: not finished, or imported
    commit: str
    project: str  # empty: this repository
    dirty: bool
    planned: int
    missing: int
    statuses: dict[str, int]
    gpus: tuple[str, ...]

    @property
    def received(self) -> int:
        return sum(self.statuses.values())


@dataclass(frozen=True, slots=True)
class RunName:
    """Fields that identify a run to people; its progress is in its RunSummary."""

    uuid: str
    suite: str
    status: str
    created_at: datetime
    trigger: str = ""


@dataclass(frozen=True, slots=True)
class OwnedRun:
    """A run with status running. owner: the process that executes it; None: unknown."""

    uuid: str
    suite: str
    trigger: str
    created_at: datetime
    owner: RunOwner | None


def run_names(
    session: Session, *, without_suites: Sequence[str] = (), limit: int | None = None
) -> list[RunName]:
    """Return runs, newest first, without reading results. without_suites: exclude these suites."""
    query = (
        select(*columns_of(RunName, Run))
        .order_by(Run.created_at.desc(), Run.id.desc())
        .limit(limit)
    )
    if without_suites:
        query = query.where(Run.suite.not_in(without_suites))
    return rows_of(session, RunName, query)


def runs_by_uuid(
    session: Session, uuids: Sequence[str], *, count: CountRuns | None = None
) -> list[RunSummary]:
    """Return these runs in the given order; runs that are not stored are left out.

    count: instead of `run_counts`.
    """
    rows = session.execute(select(Run.uuid, Run.id).where(Run.uuid.in_(uuids)))
    ids = {row.uuid: row.id for row in rows}
    chosen = [ids[uuid] for uuid in uuids if uuid in ids]
    return _summaries(session, chosen, count or run_counts)


def runs(
    session: Session,
    *,
    suite: str | None = None,
    status: str | None = None,
    gpu: str | None = None,
    without_suites: Sequence[str] = (),
    limit: int | None = None,
) -> list[RunSummary]:
    """Return runs, newest first. without_suites: exclude these suites."""
    query = select(Run.id).order_by(Run.created_at.desc(), Run.id.desc()).limit(limit)
    if suite is not None:
        query = query.where(Run.suite == suite)
    if without_suites:
        query = query.where(Run.suite.not_in(without_suites))
    if status is not None:
        query = query.where(Run.status == status)
    if gpu is not None:
        query = query.where(_measured_on(gpu))
    return _summaries(session, session.scalars(query).all())


def last_nights(session: Session, *, limit: int) -> list[RunSummary]:
    """Return the last scheduled run of each suite and project, of so many newest; newest first."""
    query = (
        select(Run.id, Run.suite, Commit.project)
        .join(Commit, Run.commit_id == Commit.id)
        .where(Run.trigger == SCHEDULED)
        .order_by(Run.created_at.desc(), Run.id.desc())
        .limit(limit)
    )
    newest: dict[tuple[str, str], int] = {}
    for run_id, suite, project in session.execute(query):
        newest.setdefault((suite, project), run_id)
    return _summaries(session, list(newest.values()))


_NEWEST_FIRST = Listing(Run.uuid, (Run.created_at, Run.id), (True, True))


def runs_page(
    session: Session,
    filters: Filters,
    page: Page,
    *,
    gpus: Sequence[str] = (),
    count: CountRuns | None = None,
) -> tuple[list[RunSummary], int]:
    """Return a page of runs, newest first, and the number of all.

    filters: suites, statuses (of the run), projects, since and until (its start) apply. gpus: only
    runs with a result on one of them. count: instead of `run_counts`.
    """
    conditions: list[ColumnElement[bool]] = [
        column.in_(values)
        for column, values in (
            (Run.suite, filters.suites),
            (Run.status, filters.statuses),
            (Commit.project, filters.projects),
        )
        if values
    ]
    if filters.since is not None:
        conditions.append(Run.created_at >= filters.since)
    if filters.until is not None:
        conditions.append(Run.created_at <= filters.until)
    if gpus:
        conditions.append(or_(*map(_measured_on, gpus)))
    query = select(Run.id).join(Commit, Run.commit_id == Commit.id).where(*conditions)
    ids = session.scalars(_NEWEST_FIRST.page(session, query, page)).all()
    return _summaries(session, ids, count or run_counts), count_of(session, query)


def run_by_uuid_prefix(session: Session, prefix: str) -> RunSummary:
    """Return the run whose uuid begins with the prefix; an exact match takes precedence.

    Raises as `run_uuid_of`.
    """
    uuid = run_uuid_of(session, prefix)
    return runs_by_uuid(session, [uuid])[0]


def run_uuid_of(session: Session, prefix: str) -> str:
    """Return the uuid of the run whose uuid begins with the prefix; an exact match wins.

    Raises NotFoundError if there is none, AmbiguousError if there are several. An empty prefix,
    for example from an unset variable of a script, matches none.
    """
    rows = session.execute(
        select(Run.uuid)
        .where(Run.uuid.startswith(prefix, autoescape=True))
        .order_by(Run.created_at.desc(), Run.id.desc())
        .limit(_MAX_NAMED + 1)
    ).all()
    if not rows or not prefix:
        raise NotFoundError(
            f"no run begins with {prefix!r}: check the uuid, or name another database with --db"
        )
    exact = [row for row in rows if row.uuid == prefix]
    if len(rows) > 1 and not exact:
        names = ", ".join(row.uuid for row in rows[:_MAX_NAMED])
        more = " and more" if len(rows) > _MAX_NAMED else ""
        raise AmbiguousError(f"several runs begin with {prefix!r}: {names}{more}; write more of it")
    return str((exact or rows)[0].uuid)


def latest_runs(
    session: Session,
    *,
    complete: bool = False,
    suite: str | None = None,
    without_suites: Sequence[str] = (),
    trigger: str | None = None,
    without_triggers: Sequence[str] = (),
    backend: str | None = None,
    project: str | None = None,
) -> dict[str, RunSummary]:
    """Return the newest run with a result on each GPU SKU, by SKU.

    complete: only complete runs: their status is complete, or no planned case is missing (a file
    written during the run was imported). without_suites: exclude runs of these suites. trigger:
    only runs with this trigger. backend: only SKUs of this backend. project: only runs at commits
    of this project; None: any.
    """
    query = select(Run.id)
    if project is not None:
        of_project = select(Commit.id).where(Commit.project == project)
        query = query.where(Run.commit_id.in_(of_project))
    if trigger is not None:
        query = query.where(Run.trigger == trigger)
    if without_triggers:
        query = query.where(Run.trigger.not_in(without_triggers))
    if complete:
        has_plan = exists().where(PlannedCase.run_id == Run.id)
        has_missing = exists().where(PlannedCase.run_id == Run.id, ~_received())
        query = query.where(or_(Run.status == "complete", and_(has_plan, ~has_missing)))
    if suite is not None:
        query = query.where(Run.suite == suite)
    if without_suites:
        query = query.where(Run.suite.not_in(without_suites))
    return _newest_by_gpu(session, query, backend)


def first_run_sharing_cases(session: Session, run_uuid: str, among: Sequence[str]) -> str | None:
    """Return the first run of `among` with a timed result in a series of this run, or None."""
    own, other = aliased(Measurement), aliased(Measurement)
    run_id = select(Run.id).where(Run.uuid == run_uuid).scalar_subquery()
    for uuid in among:
        other_id = select(Run.id).where(Run.uuid == uuid).scalar_subquery()
        shares = (
            select(own.id)
            .join(other, (other.case_key == own.case_key) & (other.series_id == own.series_id))
            .where(
                own.run_id == run_id,
                other.run_id == other_id,
                own.median_us.is_not(None),
                other.median_us.is_not(None),
            )
        )
        if session.scalar(shares.limit(1)) is not None:
            return uuid
    return None


def suite_names(session: Session) -> tuple[str, ...]:
    """Return the suites of all runs, sorted."""
    return tuple(session.scalars(select(Run.suite).distinct().order_by(Run.suite)))


def measured_commits(session: Session, suite: str, *, project: str) -> set[str]:
    """Return the shas of the clean commits of a project with a complete run of a suite."""
    query = (
        select(Commit.sha)
        .join(Run, Run.commit_id == Commit.id)
        .where(Run.suite == suite, Run.status == "complete")
        .where(Commit.project == project, Commit.dirty.is_(False))
    )
    return set(session.scalars(query))


def run_info(session: Session, run_uuid: str) -> RunInfo:
    """Return a run with its plan, in the form used in records. Raises NotFoundError."""
    run = session.execute(select(*Run.__table__.columns).where(Run.uuid == run_uuid)).one_or_none()
    if run is None:
        raise NotFoundError(f"no run {run_uuid} is stored: name another database with --db")
    plan = session.scalars(
        select(PlannedCase.case_key)
        .where(PlannedCase.run_id == run.id)
        .order_by(PlannedCase.position)
    )
    return RunInfo(
        uuid=run.uuid,
        suite=run.suite,
        trigger=run.trigger,
        status=run.status,
        created_at=run.created_at.isoformat(),
        idempotency_key=run.idempotency_key,
        plan=tuple(plan),
    )


def run_options(session: Session, run_uuid: str) -> dict[str, Any]:
    """Return the stored options of a run's command, by name; empty: unknown."""
    return session.scalar(select(Run.options).where(Run.uuid == run_uuid)) or {}


def owned_runs(session: Session, uuids: Collection[str] | None = None) -> list[OwnedRun]:
    """Return these runs, newest first; None: those with status running.

    Their process may have died.
    """
    chosen = Run.status == "running" if uuids is None else Run.uuid.in_(uuids)
    owner = (Run.owner_host, Run.owner_pid, Run.owner_start)
    query = (
        select(*columns_of(OwnedRun, Run), *owner)
        .where(chosen)
        .order_by(Run.created_at.desc(), Run.id.desc())
    )
    return [
        OwnedRun(*(*values, None if host is None else RunOwner(host, pid, start)))
        for *values, host, pid, start in session.execute(query)
    ]


def leased_jobs(session: Session, run_uuid: str) -> int:
    """Count the jobs of a run that are leased to workers now, by the database's clock.

    A lease with a later heartbeat was left behind when the clock was set back.
    """
    now = database_time(session)
    query = (
        select(func.count())
        .select_from(Job)
        .join(Run, Job.run_id == Run.id)
        .where(Run.uuid == run_uuid, JOB_LEASES.is_live(now), Job.heartbeat_at <= now)
    )
    return session.scalars(query).one()


def missing_cases(session: Session, run_uuid: str) -> tuple[str, ...]:
    """Return the keys of the planned cases without a result, in plan order."""
    query = (
        select(PlannedCase.case_key)
        .join(Run)
        .where(Run.uuid == run_uuid, ~_received())
        .order_by(PlannedCase.position)
    )
    return tuple(session.scalars(query))


def cases_to_measure(session: Session, run_uuid: str) -> tuple[str, ...]:
    """Return the keys of planned cases without a result or with open repetitions, in plan order."""
    has_open_job = exists().where(
        Job.run_id == PlannedCase.run_id,
        Job.case_key == PlannedCase.case_key,
        Job.state.in_(UNFINISHED_JOB_STATES),
    )
    query = (
        select(PlannedCase.case_key)
        .join(Run)
        .where(Run.uuid == run_uuid, ~_received() | has_open_job)
        .order_by(PlannedCase.position)
    )
    return tuple(session.scalars(query))


def _newest_by_gpu(
    session: Session, run_ids_query: Select[int], backend: str | None
) -> dict[str, RunSummary]:
    newest = run_ids_query.order_by(Run.created_at.desc(), Run.id.desc()).limit(1)
    run_ids: dict[str, int] = {}
    skus = select(Series.gpu).distinct().order_by(Series.gpu)
    if backend is not None:
        skus = skus.where(Series.backend == backend)
    for gpu in session.scalars(skus).all():
        run_id = session.scalar(newest.where(_measured_on(gpu)))
        if run_id is not None:
            run_ids[gpu] = run_id
    ids = list(dict.fromkeys(run_ids.values()))
    by_id = dict(zip(ids, _summaries(session, ids), strict=True))
    return {gpu: by_id[run_id] for gpu, run_id in run_ids.items()}


def _measured_on(gpu: str) -> ColumnElement[bool]:
    return exists().where(
        Measurement.run_id == Run.id, Measurement.series_id == Series.id, Series.gpu == gpu
    )


def _received() -> ColumnElement[bool]:
    return exists().where(
        Measurement.run_id == PlannedCase.run_id, Measurement.case_key == PlannedCase.case_key
    )


@dataclass(frozen=True, slots=True)
class RunCounts:
    """The fields of a RunSummary that are counted from its plan and its results."""

    planned: int
    missing: int
    statuses: dict[str, int]
    gpus: tuple[str, ...]


CountRuns = Callable[[Session, Sequence[int]], Mapping[int, RunCounts]]


def run_counts(session: Session, run_ids: Sequence[int]) -> dict[int, RunCounts]:
    """Count the planned cases and the results of runs, by id. Reads all of their results."""
    in_runs = PlannedCase.run_id.in_(run_ids)
    planned = _counts(session, in_runs)
    missing = _counts(session, in_runs, ~_received())
    statuses: dict[int, dict[str, int]] = defaultdict(dict)
    for run_id, status, count in session.execute(
        select(Measurement.run_id, Measurement.status, func.count())
        .join(Series, Measurement.series_id == Series.id)
        .where(Measurement.run_id.in_(run_ids), is_latest_attempt())
        .group_by(Measurement.run_id, Measurement.status)
        .order_by(Measurement.status)
    ):
        statuses[run_id][status] = count
    gpus: dict[int, list[str]] = defaultdict(list)
    for run_id, gpu in session.execute(
        select(Measurement.run_id, Series.gpu)
        .join(Series, Measurement.series_id == Series.id)
        .where(Measurement.run_id.in_(run_ids))
        .distinct()
        .order_by(Series.gpu)
    ):
        gpus[run_id].append(gpu)
    return {
        run_id: RunCounts(
            planned.get(run_id, 0), missing.get(run_id, 0), statuses[run_id], tuple(gpus[run_id])
        )
        for run_id in run_ids
    }


def rows_stored(session: Session) -> tuple[int, int]:
    """Return the highest ids of the planned cases and of the results: they grow with each."""
    planned = session.scalar(select(func.max(PlannedCase.id)))
    measured = session.scalar(select(func.max(Measurement.id)))
    return planned or 0, measured or 0


def runs_changed_since(session: Session, rows: tuple[int, int]) -> set[int]:
    """Return the ids of the runs with a planned case or a result added since `rows_stored`."""
    planned, measured = rows
    changed = (
        select(PlannedCase.run_id).where(PlannedCase.id > planned).distinct(),
        select(Measurement.run_id).where(Measurement.id > measured).distinct(),
    )
    return {run_id for query in changed for run_id in session.scalars(query)}


def _summaries(
    session: Session, run_ids: Sequence[int], count: CountRuns = run_counts
) -> list[RunSummary]:
    """Return the summaries of runs in the order of `run_ids`."""
    rows = session.execute(
        select(Run.id, *columns_of(RunSummary, Run, Commit, commit=Commit.sha))
        .join(Commit, Run.commit_id == Commit.id)
        .where(Run.id.in_(run_ids))
    ).mappings()
    by_id = {row["id"]: {name: row[name] for name in row if name != "id"} for row in rows}
    counts = count(session, run_ids)
    return [
        RunSummary(
            **by_id[run_id], **{f.name: getattr(counts[run_id], f.name) for f in fields(RunCounts)}
        )
        for run_id in run_ids
    ]


def _counts(session: Session, *conditions: ColumnElement[bool]) -> dict[int, int]:
    query = select(PlannedCase.run_id, func.count()).where(*conditions).group_by(PlannedCase.run_id)
    return {row[0]: row[1] for row in session.execute(query)}
