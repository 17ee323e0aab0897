"""Insert records: their measurements, and the rows they reference, each inserted once.

A Writer is used within one transaction that holds the writer's lock, so the ids it caches stay
valid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.orm import Session

from flexq_bench.db.dialects import insert_rows, lock_for_writing
from flexq_bench.db.encoding import INT64
from flexq_bench.db.errors import ConflictError, NotFoundError
from flexq_bench.db.families import FAMILIES, column_values
from flexq_bench.db.identity import fingerprint, series_key
from flexq_bench.db.lines import add_parents, place_commits
from flexq_bench.db.records import (
    EXTERNAL_BACKEND,
    AnyRecord,
    CommitInfo,
    DeviceInfo,
    ModelResultRecord,
    Record,
    RunInfo,
)
from flexq_bench.db.tables import (
    Base,
    BranchCommit,
    Commit,
    Device,
    Environment,
    Epoch,
    Measurement,
    PlannedCase,
    Run,
    Sample,
    Series,
)
from flexq_bench.db.units import conversion

_PROJECT = "project"
TIME_OF_IMPORT = "time_of_import"  # in `extra`: nobody said when it was measured
_BATCH = 500  # measurements per bulk insert
_IDENTITY = tuple(
    column.name
    for column in Series.__table__.columns
    if column.name not in {"id", "identity_hash", _PROJECT}
)
_SERIES_FIELDS = (*_IDENTITY, _PROJECT)
_UNIT = _SERIES_FIELDS.index("unit")
_COMMIT_KEY = ("sha", "dirty", _PROJECT)
_Key = tuple[Any, ...]
_series_key: Callable[[Record], _Key] = attrgetter(*_SERIES_FIELDS)


def series_identity(record: Record) -> dict[str, Any]:
    """Return the fields that must be equal for two records to be comparable.

    `series_key` gives the key of the series. An empty project is left out, so that series from
    before projects existed keep their keys.
    """
    identity = {name: getattr(record, name) for name in _IDENTITY}
    return identity | ({_PROJECT: record.project} if record.project else {})


class Writer:
    """Inserts records in the transaction of a session. Call `flush` after the last `add`."""

    def __init__(self, session: Session, *, replacing: bool = False) -> None:
        """replacing: a record that differs from the stored one with its uuid replaces it."""
        lock_for_writing(session.connection())
        self._session = session
        self._replacing = replacing
        self._ids: dict[_Key, int] = {}
        self._opened: dict[int, datetime] = {}
        self._pending: dict[str, Record] = {}
        self._not_placed: set[str] = set()  # projects with new commits
        self.added = 0
        self.replaced = 0
        self.changed_series: set[int] = set()  # ids, of what was added or replaced

    def add(self, record: AnyRecord) -> None:
        """Store a canonical record, or queue it if it is a measurement.

        Queued records are stored in batches, the rest by `flush`. Raises ConflictError like `run`.
        """
        if not isinstance(record, Record):
            self._add_model_result(record)
            return
        self._pending.setdefault(record.uuid, record)  # the first is kept, as of two files
        if len(self._pending) >= _BATCH:
            self.flush()

    def add_all(self, records: Iterable[AnyRecord]) -> None:
        """Store canonical records."""
        for record in records:
            self.add(record)
        self.flush()
        self.place_commits()

    def flush(self) -> None:
        """Store the queued records; those whose uuid is stored are ignored, or replace it.

        Of two results of the same repetition of a case in a run, the first is kept.
        Raises ConflictError like `run`.
        """
        uuids = list(self._pending)
        stored = set(
            self._session.scalars(select(Measurement.uuid).where(Measurement.uuid.in_(uuids)))
        )
        known = [record for uuid, record in self._pending.items() if uuid in stored]
        new = [record for uuid, record in self._pending.items() if uuid not in stored]
        self._cache_commits_and_runs([*new, *known] if self._replacing else new)
        records = self._first_of_each_repetition(new)
        self._pending.clear()
        self._add_new(records)
        if self._replacing:
            self._replace(known)

    def _replace(self, known: Sequence[Record]) -> None:
        """Replace the stored measurements that differ from these records of the same uuids."""
        records = {record.uuid: record for record in self._with_references(known)}
        query = select(*Measurement.__table__.columns, Sample.data)
        query = query.outerjoin(Sample, Sample.measurement_id == Measurement.id)
        stored = self._session.execute(query.where(Measurement.uuid.in_(list(records))))
        for old in stored.mappings().all():
            record = records[old["uuid"]]
            row = self._measurement_row(record)
            if record.extra.get(TIME_OF_IMPORT):  # says nothing of the result
                row["created_at"] = old["created_at"]
            row["placement_medians_us"] = list(row["placement_medians_us"])  # as JSON has it
            samples = _sample_rows(record, old["id"])
            # Without a row of samples, they were pruned.
            same_samples = old["data"] in (None, *(sample["data"] for sample in samples))
            if same_samples and all(old[name] == value for name, value in row.items()):
                continue
            self.changed_series |= {old["series_id"], row["series_id"]}
            by_id = Measurement.id == old["id"]
            self._session.execute(update(Measurement).where(by_id).values(row))
            self._session.execute(delete(Sample).where(Sample.measurement_id == old["id"]))
            self._add_rows(Sample, samples)
            self.replaced += 1

    def _with_references(self, records: Sequence[Record]) -> list[Record]:
        """Cache the ids of what records reference; return them in the units of their series."""
        converted = self._in_stored_series(records)
        self._cache_devices(converted)
        self._cache_epochs(converted)
        return converted

    def _add_new(self, new_records: Sequence[Record]) -> None:
        if not new_records:
            return
        records = self._with_references(new_records)
        rows = [self._measurement_row(record) for record in records]
        self.changed_series |= {row["series_id"] for row in rows}
        self._add_rows(Measurement, rows)
        if sampled := [record for record in records if record.samples_us]:
            new = [record.uuid for record in sampled]
            query = select(Measurement.uuid, Measurement.id).where(Measurement.uuid.in_(new))
            ids = {row.uuid: row.id for row in self._session.execute(query)}
            samples = [row for record in sampled for row in _sample_rows(record, ids[record.uuid])]
            self._add_rows(Sample, samples)
        self.added += len(records)

    def commit(self, info: CommitInfo) -> int:
        """Return the id of a commit, inserted if missing; its empty columns are filled in.

        `place_commits` must follow.
        """
        key = ("commit", info)
        if key not in self._ids:
            self._cache_commits([info])
        return self._ids[key]

    def _cache_commits(self, infos: Iterable[CommitInfo]) -> None:
        """Cache the ids of commits like `commit`, with few statements for all of them."""
        new = [info for info in dict.fromkeys(infos) if ("commit", info) not in self._ids]
        if not new:
            return
        rows = {info: _commit_row(info) for info in new}
        columns = Commit.__table__.columns
        query = select(*columns).where(columns["sha"].in_({info.sha for info in new}))

        def stored() -> dict[_Key, dict[str, Any]]:
            rows = map(dict, self._session.execute(query).mappings())
            return {_commit_key(row): row for row in rows}

        known = stored()
        missing = {_commit_key(row): row for row in rows.values() if _commit_key(row) not in known}
        if missing:
            self._add_rows(Commit, list(missing.values()))
            known = stored()
        on_branch = set(
            self._session.scalars(
                select(BranchCommit.commit_id).where(
                    BranchCommit.commit_id.in_({row["id"] for row in known.values()})
                )
            )
        )
        parents: dict[str, dict[str, tuple[str, ...]]] = {}
        for info, row in rows.items():
            self._ids["commit", info] = self._complete(known[_commit_key(row)], row, on_branch)
            if info.parents:
                parents.setdefault(info.project, {}).setdefault(info.sha, info.parents)
        for project, of_commits in parents.items():
            add_parents(self._session, project, of_commits)

    def place_commits(self) -> None:
        """Place the commits that were added or completed on their lines (db.lines)."""
        for project in sorted(self._not_placed):
            place_commits(self._session, project, at=datetime.now(UTC))
        self._not_placed.clear()

    def run(self, info: RunInfo, commit_id: int) -> int:
        """Return the id of a run, inserted with its plan if missing. A stored run keeps its status.

        Raises ConflictError if another run has its idempotency key.
        """
        key = ("run", info)
        if key not in self._ids:
            self._cache_runs({info: commit_id})
        return self._ids[key]

    def stored_runs(self, infos: Collection[RunInfo]) -> dict[str, int]:
        """Return the ids of those of the runs that are stored, by uuid. Raises like `run`."""
        query = select(Run.id, Run.uuid, Run.idempotency_key).where(
            Run.uuid.in_({info.uuid for info in infos})
            | Run.idempotency_key.in_({info.idempotency_key for info in infos})
        )
        rows = self._session.execute(query).all()
        owners = {row.idempotency_key: row.uuid for row in rows}
        for info in infos:
            uuid = owners.setdefault(info.idempotency_key, info.uuid)
            if uuid != info.uuid:
                raise ConflictError(
                    f"run {info.uuid} has the idempotency key {info.idempotency_key!r} of run "
                    f"{uuid}, which is stored: keep one of them, or name another database"
                )
        return {row.uuid: row.id for row in rows}

    def _cache_runs(self, commit_ids: Mapping[RunInfo, int]) -> None:
        """Cache the ids of runs like `run`, with few statements for all of them."""
        new = [info for info in commit_ids if ("run", info) not in self._ids]
        if not new:
            return
        ids = self.stored_runs(new)
        missing = {
            info.uuid: _run_row(info, commit_ids[info]) for info in new if info.uuid not in ids
        }
        if missing:
            self._add_rows(Run, list(missing.values()))
            ids = self.stored_runs(new)
        for info in new:
            self._ids["run", info] = ids[info.uuid]
            self.plan(ids[info.uuid], info.plan)

    def plan(self, run_id: int, case_keys: Iterable[str]) -> None:
        """Append the cases that are missing in a run's plan."""
        cases = dict.fromkeys(case_keys)
        if not cases:
            return
        planned = select(PlannedCase.case_key).where(PlannedCase.run_id == run_id)
        stored_keys = set(self._session.scalars(planned))
        rows = [
            {"run_id": run_id, "position": position, "case_key": case_key}
            for position, case_key in enumerate(
                (c for c in cases if c not in stored_keys), len(stored_keys)
            )
        ]
        self._add_rows(PlannedCase, rows)

    def device(self, info: DeviceInfo) -> int:
        """Return the id of a device with these settings, inserted if missing."""
        key = ("device", info)
        if key not in self._ids:
            self._ids[key] = self._row_id(Device, _device_row(info), by=("fingerprint",))
        return self._ids[key]

    def environment(self, content: Mapping[str, str]) -> int:
        """Return the id of the environment with this content, inserted if missing."""
        key = ("environment", *sorted(content.items()))
        if key not in self._ids:
            row = {"content": dict(content), "fingerprint": fingerprint(content)}
            self._ids[key] = self._row_id(Environment, row, by=("fingerprint",))
        return self._ids[key]

    def series(self, identity: Mapping[str, Any]) -> int:
        """Return the id of a series by its full identity (see `series_identity`)."""
        key = tuple(({_PROJECT: ""} | {**identity})[name] for name in _SERIES_FIELDS)
        self._cache_ids(Series, {key: _series_row(key)}, by="identity_hash")
        return self._ids[key]

    def _add_model_result(self, record: ModelResultRecord) -> None:
        """Store a result of a whole model, unless its uuid is stored (see Family.is_replaced)."""
        family = FAMILIES[type(record)]
        table = family.table
        created_at = _parse_time(record.created_at)
        stored = self._session.execute(
            select(table.id, table.created_at).where(table.uuid == record.uuid)
        ).one_or_none()
        if stored is not None and not (family.is_replaced and stored.created_at < created_at):
            return
        commit_id = self.commit(record.commit)
        row = column_values(record) | {
            "run_id": self.run(record.run, commit_id),
            "commit_id": commit_id,
            "device_id": self.device(record.device),
            "environment_id": self.environment(record.environment),
            "created_at": created_at,
        }
        if stored is None:
            result_id = self._insert(table, row)
        else:
            result_id = stored.id
            self._session.execute(update(table).where(table.id == result_id).values(row))
        if family.samples is not None:
            samples = family.samples.table
            same_result = getattr(samples, family.samples.result_id) == result_id
            self._session.execute(delete(samples).where(same_result))
            for sample in _sample_rows(record, result_id):
                self._session.execute(insert(samples).values(sample))
        self.added += 1

    def _first_of_each_repetition(self, records: Sequence[Record]) -> list[Record]:
        keys = {
            record.uuid: (self.run(record.run, self._commit_of(record)), record.case, repetition)
            for record in records
            if (repetition := _repetition(record)) is not None
        }
        if not keys:
            return list(records)
        columns = (Measurement.run_id, Measurement.case_key, Measurement.repetition)
        stored = select(*columns).where(
            Measurement.run_id.in_({run for run, _, _ in keys.values()}),
            Measurement.case_key.in_({case for _, case, _ in keys.values()}),
            Measurement.repetition.is_not(None),
        )
        stored_keys = {tuple(row) for row in self._session.execute(stored)}
        first = []
        for record in records:
            key = keys.get(record.uuid)
            if key not in stored_keys:
                first.append(record)
            if key is not None:
                stored_keys.add(key)
        return first

    def _in_stored_series(self, records: Sequence[Record]) -> list[Record]:
        """Cache the series ids of all records, with few statements instead of two per record.

        Returns the records; external ones that begin a series are converted to the unit of a stored
        series that differs in the unit alone.
        """
        keys = dict.fromkeys(map(_series_key, records))
        self._find_ids(Series, {key: _series_hash(key) for key in keys}, by="identity_hash")
        new = [record for record in records if _series_key(record) not in self._ids]
        if not new:
            return list(records)
        units = self._stored_units({r.kernel for r in new if r.backend == EXTERNAL_BACKEND})
        in_units = [
            _converted(record, units.setdefault(_without_unit(_series_key(record)), []))
            if record.backend == EXTERNAL_BACKEND and _series_key(record) not in self._ids
            else record
            for record in records
        ]
        rows = {key: _series_row(key) for key in dict.fromkeys(map(_series_key, in_units))}
        self._cache_ids(Series, rows, by="identity_hash")
        return in_units

    def _stored_units(self, kernels: Collection[str]) -> dict[_Key, list[str]]:
        """Return the units of the stored external series of benchmarks, by the key without unit."""
        units: dict[_Key, list[str]] = {}
        if kernels:
            query = select(*(Series.__table__.columns[name] for name in _SERIES_FIELDS))
            query = query.where(Series.backend == EXTERNAL_BACKEND, Series.kernel.in_(kernels))
            for row in self._session.execute(query):
                units.setdefault(_without_unit(tuple(row)), []).append(row.unit)
        return units

    def _cache_devices(self, records: Sequence[Record]) -> None:
        """Cache the device ids of all records, like `_cache_series`."""
        rows: dict[_Key, dict[str, Any]] = {
            ("device", info): _device_row(info)
            for info in dict.fromkeys(record.device for record in records)  # ids by first record
            if ("device", info) not in self._ids
        }
        self._cache_ids(Device, rows, by="fingerprint")

    def _cache_ids(
        self, table: type[Base], rows: Mapping[_Key, Mapping[str, Any]], *, by: str
    ) -> None:
        """Cache the id of each row under its key; missing rows are inserted."""
        values = {key: row[by] for key, row in rows.items()}
        self._find_ids(table, values, by=by)
        new = {row[by]: row for key, row in rows.items() if key not in self._ids}
        if new:
            self._add_rows(table, list(new.values()))
            self._find_ids(table, values, by=by)

    def _find_ids(self, table: type[Base], values: Mapping[_Key, str], *, by: str) -> None:
        """Cache the ids of the stored rows with these values in the column `by`, under the keys."""
        missing = {key: value for key, value in values.items() if key not in self._ids}
        if not missing:
            return
        column, row_id = table.__table__.columns[by], table.__table__.columns["id"]
        query = select(column, row_id).where(column.in_(set(missing.values())))
        ids: dict[str, int] = {row[0]: row[1] for row in self._session.execute(query)}
        self._ids |= {key: ids[value] for key, value in missing.items() if value in ids}

    def _cache_epochs(self, records: Sequence[Record]) -> None:
        """Cache the epochs of all records; a new epoch begins with its earliest record."""
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for record in records:
            pair = self._ids[_series_key(record)], self.environment(record.environment)
            at = _parse_time(record.created_at)
            if ("epoch", *pair) in self._ids or (pair in rows and rows[pair]["opened_at"] <= at):
                continue
            rows[pair] = {
                "series_id": pair[0],
                "environment_id": pair[1],
                "first_run_id": self.run(record.run, self._commit_of(record)),
                "opened_at": at,
            }
        if not rows:
            return
        columns = (Epoch.series_id, Epoch.environment_id, Epoch.id, Epoch.opened_at)
        stored = select(*columns).where(Epoch.series_id.in_({series for series, _ in rows}))
        epochs = self._session.execute(stored).all()
        stored_pairs = {(row.series_id, row.environment_id) for row in epochs}
        new = [row for pair, row in rows.items() if pair not in stored_pairs]
        if new:
            self._add_rows(Epoch, new)
            epochs = self._session.execute(stored).all()
        for row in epochs:
            self._ids["epoch", row.series_id, row.environment_id] = row.id
            self._opened[row.id] = row.opened_at

    def _cache_commits_and_runs(self, records: Sequence[Record]) -> None:
        self._cache_commits(map(_commit_info, records))
        self._cache_runs({record.run: self._commit_of(record) for record in records})

    def _commit_of(self, record: Record) -> int:
        """Return the id of a record's commit, in the project of its series."""
        return self.commit(_commit_info(record))

    def _measurement_row(self, record: Record) -> dict[str, Any]:
        commit_id = self._commit_of(record)
        run_id = self.run(record.run, commit_id)
        series_id = self._ids[_series_key(record)]
        created_at = _parse_time(record.created_at)
        return column_values(record) | {
            "run_id": run_id,
            "case_key": record.case,
            "repetition": _repetition(record),
            "series_id": series_id,
            "epoch_id": self._epoch(
                series_id, self.environment(record.environment), run_id, created_at
            ),
            "commit_id": commit_id,
            "device_id": self.device(record.device),
            "created_at": created_at,
        }

    def _epoch(self, series_id: int, environment_id: int, run_id: int, created_at: datetime) -> int:
        epoch_id = self._ids["epoch", series_id, environment_id]  # cached by _cache_epochs
        # Results may be imported in any order; an epoch begins with the earliest.
        if created_at < self._opened[epoch_id]:
            self._opened[epoch_id] = created_at
            self._session.execute(
                update(Epoch)
                .where(Epoch.id == epoch_id)
                .values(first_run_id=run_id, opened_at=created_at)
            )
        return epoch_id

    def _complete(
        self, stored: dict[str, Any], row: Mapping[str, Any], on_branch: Collection[int]
    ) -> int:
        """Fill the empty columns of a stored commit, and return its id."""
        unknown = (None, "")
        new_values = {
            name: value
            for name, value in row.items()
            if stored[name] in unknown and value not in unknown
        }
        commit_id: int = stored["id"]
        if new_values:
            self._session.execute(update(Commit).where(Commit.id == commit_id).values(new_values))
            stored |= new_values
        is_placed = stored["position"] is not None or stored["orphaned_at"] is not None
        if new_values or not (is_placed or commit_id in on_branch):
            self._not_placed.add(stored[_PROJECT])
        return commit_id

    def _row_id(self, table: type[Base], row: Mapping[str, Any], *, by: tuple[str, ...]) -> int:
        """Return the id of the row with these values in the columns `by`, inserted if missing."""
        columns = table.__table__.columns
        query = select(columns["id"]).where(*(columns[name] == row[name] for name in by))
        row_id = self._session.scalar(query)
        return self._insert(table, row) if row_id is None else int(row_id)

    def _add_rows(self, table: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
        insert_rows(self._session.connection(), table.metadata.tables[table.__tablename__], rows)

    def _insert(self, table: type[Base], row: Mapping[str, Any]) -> int:
        columns = table.__table__.columns
        return int(self._session.scalars(insert(table).values(row).returning(columns["id"])).one())


def _without_unit(series: _Key) -> _Key:
    return (*series[:_UNIT], *series[_UNIT + 1 :])


def _converted(record: Record, units: list[str]) -> Record:
    """Return a record in one of the units if it can be converted; else its unit joins them."""
    if record.unit in units:
        return record
    factors = ((unit, conversion(record.unit, unit)) for unit in units)
    unit, factor = next(((u, f) for u, f in factors if f is not None), ("", None))
    if factor is None:
        units.append(record.unit)
        return record

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * factor

    return replace(
        record,
        unit=unit,
        median_us=scaled(record.median_us),
        ci_low_us=scaled(record.ci_low_us),
        ci_high_us=scaled(record.ci_high_us),
        placement_medians_us=tuple(value * factor for value in record.placement_medians_us),
        samples_us=tuple(tuple(v * factor for v in values) for values in record.samples_us),
    )


def _repetition(record: Record) -> int | None:
    value = record.extra.get("repetition")
    return value if type(value) is int and value in INT64 else None


def _device_row(info: DeviceInfo) -> dict[str, Any]:
    row = {item.name: getattr(info, item.name) for item in fields(DeviceInfo)}
    return {**row, "fingerprint": fingerprint(row)}


def _commit_info(record: Record) -> CommitInfo:
    commit = record.commit
    if commit.project != record.project:  # a record from before commits were stored per project
        commit = replace(commit, project=record.project)
    return commit


def _commit_row(info: CommitInfo) -> dict[str, Any]:
    return {
        "sha": info.sha,
        "parent_sha": info.parent,
        "topo_order": info.topo_order,
        "dirty": info.dirty,
        "subject": info.subject,
        "author": info.author,
        "committed_at": _parse_time(info.committed_at) if info.committed_at else None,
        "project": info.project,
        "branch": info.branch,
    }


def _commit_key(row: Mapping[str, Any]) -> _Key:
    return tuple(row[name] for name in _COMMIT_KEY)


def _run_row(info: RunInfo, commit_id: int) -> dict[str, Any]:
    row = {name: getattr(info, name) for name in RunInfo.__slots__ if name != "plan"}
    return row | {"commit_id": commit_id, "created_at": _parse_time(info.created_at)}


def _series_row(key: _Key) -> dict[str, Any]:
    return {**dict(zip(_SERIES_FIELDS, key, strict=True)), "identity_hash": _series_hash(key)}


@lru_cache(maxsize=8192)  # a history has the same series at each of its commits
def _series_hash(key: _Key) -> str:
    identity = dict(zip(_SERIES_FIELDS, key, strict=True))
    return series_key(
        {name: value for name, value in identity.items() if name != _PROJECT or value}
    )


def stored_run_id(session: Session, run_uuid: str) -> int:
    """Return the id of a run. Raises NotFoundError if it is not stored."""
    run_id = session.scalar(select(Run.id).where(Run.uuid == run_uuid))
    if run_id is None:
        raise NotFoundError(f"no run {run_uuid} is stored: name another database with --db")
    return run_id


def _sample_rows(record: AnyRecord, result_id: int) -> list[dict[str, Any]]:
    samples = FAMILIES[type(record)].samples
    if samples is None:
        return []
    rows = samples.to_rows(getattr(record, samples.field))
    return [{samples.result_id: result_id} | row for row in rows]


@lru_cache(maxsize=1024)
def _parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text)
