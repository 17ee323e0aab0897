"""Stored results of all kinds as records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from flexq_bench.db.families import FAMILIES, field_values
from flexq_bench.db.queries.filters import Filters
from flexq_bench.db.queries.runs_and_plans import run_info
from flexq_bench.db.records import AnyRecord, CommitInfo, DeviceInfo, Record, RunInfo
from flexq_bench.db.tables import Commit, CommitParent, Device, Environment, Epoch, Run, Series

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
    query = (
        select(table.id)
        .join(Run, table.run_id == Run.id)
        .join(Device, table.device_id == Device.id)
        .order_by(Run.created_at, Run.uuid, table.created_at, table.uuid)
    )
    if kind is Record:
        query = query.join(Series, table.series_id == Series.id)
        query = query.where(*filters.on_series(), *filters.on_measurement())
    elif filters.can_match_models():
        query = query.where(*filters.on_model_results(table))
    else:
        return
    ids = session.scalars(query).all()
    runs: dict[str, RunInfo] = {}
    for start in range(0, len(ids), _BATCH):
        yield from _load(session, kind, ids[start : start + _BATCH], runs)


def run_records(session: Session, run_uuid: str) -> Iterator[Record]:
    """Iterate over the measurements of a run, including repeated attempts, in their order."""
    return stored_records(session, Record, Filters(runs=(run_uuid,)))


def _load(
    session: Session, kind: type[R], ids: Sequence[int], runs: dict[str, RunInfo]
) -> Iterator[R]:
    """Iterate over the records of these results. runs: those that were read already, by uuid."""
    table, samples = FAMILIES[kind].table, FAMILIES[kind].samples
    environment_id = Epoch.environment_id if kind is Record else table.environment_id
    query = select(table, environment_id, Run.uuid).join(Run, table.run_id == Run.id)
    if kind is Record:
        query = query.join(Epoch, table.epoch_id == Epoch.id)
    query = query.where(table.id.in_(ids)).execution_options(**_FRESH)
    rows = {row[0].id: row for row in session.execute(query)}
    found_commits = _by_id(session, Commit, {row[0].commit_id for row in rows.values()})
    found_devices = _by_id(session, Device, {row[0].device_id for row in rows.values()})
    environments = _by_id(session, Environment, {row[1] for row in rows.values()})
    parents = _parents(session, {commit.sha for commit in found_commits.values()})
    commits = {
        number: _commit_info(commit, parents[commit.project, commit.sha])
        for number, commit in found_commits.items()
    }
    devices = {number: _device_info(device) for number, device in found_devices.items()}
    series: Mapping[int, Any] = {}
    if kind is Record:
        series = _by_id(session, Series, {row[0].series_id for row in rows.values()})
    sample_rows: dict[int, list[Any]] = defaultdict(list)
    if samples is not None:
        result_id = getattr(samples.table, samples.result_id)
        for sample in session.scalars(select(samples.table).where(result_id.in_(ids))):
            sample_rows[getattr(sample, samples.result_id)].append(sample)
    for number in ids:
        result, environment, run_uuid = rows[number]
        if run_uuid not in runs:
            runs[run_uuid] = run_info(session, run_uuid)
        values = field_values(kind, result)
        if series:
            values |= field_values(kind, series[result.series_id]) | {"case": result.case_key}
        if samples is not None:
            values[samples.field] = samples.from_rows(sample_rows[number])
        yield kind(
            **values,
            created_at=result.created_at.isoformat(),
            run=runs[run_uuid],
            commit=commits[result.commit_id],
            device=devices[result.device_id],
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
