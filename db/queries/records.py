"""Stored results of all kinds as records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import func, null, select
from sqlalchemy.orm import Session

from flexq_bench.db.families import FAMILIES, field_values, stored_columns
from flexq_bench.db.queries.filters import Filters
from flexq_bench.db.queries.runs_and_plans import run_info
from flexq_bench.db.records import AnyRecord, CommitInfo, DeviceInfo, Record, RunInfo
from flexq_bench.db.tables import (
    Commit,
    CommitParent,
    Device,
    Environment,
    Epoch,
    Measurement,
    Run,
    Series,
)

R = TypeVar("R", bound=AnyRecord)
T = TypeVar("T")
_BATCH = 500  # records in memory at once
_FRESH: dict[str, Any] = {"populate_existing": True}  # rows may have changed since they were loaded


def stored_records(session: Session, kind: type[R], filters: Filters | None = None) -> Iterator[R]:
    """Iterate over matching records, including repeated attempts; pruned samples are empty.

    The order (run, then time of measurement) is the same in every copy of the data. Results of
    whole models: none if a filter does not apply to them.
    """
    filters = filters or Filters()
    table = FAMILIES[kind].table
    query = select(Run.id).join(table, table.run_id == Run.id)
    if kind is Record:
        conditions = filters.on_series()
        if conditions:
            query = query.join(Series, table.series_id == Series.id)
        query = query.where(*conditions, *filters.on_measurement())
    elif filters.can_match_models():
        query = query.join(Device, table.device_id == Device.id)
        query = query.where(*filters.on_model_results(table))
    else:
        return
    order = Run.created_at, Run.uuid
    counted = query.add_columns(func.count()).group_by(Run.id, *order).order_by(*order)
    in_order = query.with_only_columns(table.id).order_by(*order, table.created_at, table.uuid)
    runs: dict[str, RunInfo] = {}
    for part in _parts(session.execute(counted).all()):
        ids = session.scalars(in_order.where(Run.id.in_(part))).all()
        for start in range(0, len(ids), _BATCH):
            yield from _load(session, kind, ids[start : start + _BATCH], runs)


def _parts(counts: Iterable[Any]) -> Iterator[list[int]]:
    """Group runs, given with their number of results, so that a group has about a batch of them."""
    part: list[int] = []
    results = 0
    for run, count in counts:
        part, results = [*part, run], results + count
        if results >= _BATCH:
            yield part
            part, results = [], 0
    if part:
        yield part


def run_records(session: Session, run_uuid: str) -> Iterator[Record]:
    """Iterate over the measurements of a run, including repeated attempts, in their order."""
    return stored_records(session, Record, Filters(runs=(run_uuid,)))


def _load(
    session: Session, kind: type[R], ids: Sequence[int], runs: dict[str, RunInfo]
) -> Iterator[R]:
    """Iterate over the records of these results. runs: those that were read already, by uuid."""
    table, samples = FAMILIES[kind].table, FAMILIES[kind].samples
    environment_id = Epoch.environment_id if kind is Record else table.environment_id
    # Columns, not objects of the ORM, which take most of the time of an export.
    own = (Measurement.series_id, Measurement.case_key) if kind is Record else (null(), null())
    shared = Run.uuid, environment_id, table.commit_id, table.device_id, table.created_at, *own
    query = select(table.id, *shared, *stored_columns(kind, table)).where(table.id.in_(ids))
    query = query.join(Run, table.run_id == Run.id)
    if kind is Record:
        query = query.join(Epoch, table.epoch_id == Epoch.id)
    rows = {row[0]: row[1:] for row in session.connection().execute(query).all()}
    used, used_environments, used_commits, used_devices, _, used_series, _ = (
        set(column) for column in zip(*(row[: len(shared)] for row in rows.values()), strict=True)
    )
    for uuid in runs.keys() - used:
        del runs[uuid]  # each has its plan
    found_commits = _by_id(session, Commit, used_commits)
    found_devices = _by_id(session, Device, used_devices)
    environments = _by_id(session, Environment, used_environments)
    parents = _parents(session, {commit.sha for commit in found_commits.values()})
    commits = {
        number: _commit_info(commit, parents[commit.project, commit.sha])
        for number, commit in found_commits.items()
    }
    devices = {number: _device_info(device) for number, device in found_devices.items()}
    series: dict[int, dict[str, Any]] = {}
    if kind is Record:
        of_series = select(Series.id, *stored_columns(kind, Series))
        for row in session.connection().execute(of_series.where(Series.id.in_(used_series))).all():
            series[row[0]] = field_values(kind, Series, row[1:])
    sample_rows: dict[int, list[Any]] = defaultdict(list)
    if samples is not None:
        result_id = getattr(samples.table, samples.result_id)
        for sample in session.scalars(select(samples.table).where(result_id.in_(ids))):
            sample_rows[getattr(sample, samples.result_id)].append(sample)
    for number in ids:
        run_uuid, environment, commit, device, created_at, of, case, *cells = rows[number]
        if run_uuid not in runs:
            runs[run_uuid] = run_info(session, run_uuid)
        values = field_values(kind, table, cells)
        if kind is Record:
            values |= series[of]
            values["case"] = case
        if samples is not None:
            values[samples.field] = samples.from_rows(sample_rows.get(number, ()))
        yield kind(
            **values,
            created_at=created_at.isoformat(),
            run=runs[run_uuid],
            commit=commits[commit],
            device=devices[device],
            environment=environments[environment].content,
        )


def _by_id(session: Session, table: type[T], ids: Collection[int]) -> dict[int, T]:
    """Return rows by id. Each is read once: a batch of results has few of each."""
    key: Any = table.id  # type: ignore[attr-defined]
    rows = session.scalars(select(table).where(key.in_(ids)).execution_options(**_FRESH))
    return {row.id: row for row in rows}  # type: ignore[attr-defined]


def _parents(session: Session, shas: Collection[str]) -> Mapping[tuple[str, str], list[str]]:
    """Return the known parents of commits, by project and sha."""
    query = (
        select(CommitParent.project, CommitParent.sha, CommitParent.parent_sha)
        .where(CommitParent.sha.in_(shas))
        .order_by(CommitParent.number)
    )
    parents: dict[tuple[str, str], list[str]] = defaultdict(list)
    for project, sha, parent in session.execute(query):
        if parent is not None:
            parents[project, sha].append(parent)
    return parents


def commit_info(session: Session, sha: str, project: str) -> CommitInfo | None:
    """Return a stored commit of a project; None: there is none."""
    query = select(Commit).where(Commit.sha == sha, Commit.project == project)
    commit = session.scalars(query).first()
    if commit is None:
        return None
    return _commit_info(commit, _parents(session, [sha]).get((project, sha), ()))


def _device_info(device: Device) -> DeviceInfo:
    return DeviceInfo(**{field.name: getattr(device, field.name) for field in fields(DeviceInfo)})


def _commit_info(commit: Commit, parents: Sequence[str]) -> CommitInfo:
    return CommitInfo(
        sha=commit.sha,
        parent=commit.parent_sha,
        topo_order=commit.topo_order,
        dirty=commit.dirty,
        subject=commit.subject,
        author=commit.author,
        committed_at=commit.committed_at.isoformat() if commit.committed_at else None,
        project=commit.project,
        parents=tuple(parents),
        branch=commit.branch,
    )
