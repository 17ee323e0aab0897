"""Write runs, their plans and their records. Safe with concurrent calls of other processes.

A call holds the writer's lock until the session's transaction ends. Keep sessions that write short:
one record, or one file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.encoding import canonical
from flexq_bench.db.errors import RecordError
from flexq_bench.db.families import FAMILIES
from flexq_bench.db.queries.runs_and_plans import run_info
from flexq_bench.db.records import (
    RUN_STATUSES,
    AnyRecord,
    CommitInfo,
    Record,
    RunInfo,
    RunOwner,
)
from flexq_bench.db.tables import Commit, Run
from flexq_bench.db.writer import Writer, stored_run_id

_IN_A_QUERY = 500  # values
_STATUS_ORDER = ("running", "interrupted", "failed", "complete")


def begin_run(
    session: Session,
    run: RunInfo,
    commit: CommitInfo,
    owner: RunOwner | None = None,
    options: Mapping[str, Any] | None = None,
) -> RunInfo:
    """Store a run and its plan, or resume it; return the stored run.

    owner: the process that executes it; None: unknown. options: of its command, by name; None:
    those that are stored. A stored run with this idempotency key (or
    uuid) is resumed: its status is set to the given one, and new planned cases are appended. Raises
    RecordError.
    """
    run = canonical(run)
    writer = Writer(session)
    stored = session.scalar(select(Run.uuid).where(Run.idempotency_key == run.idempotency_key))
    resumed = dataclasses.replace(run, uuid=stored or run.uuid)
    run_id = writer.run(resumed, writer.commit(canonical(commit)))
    writer.place_commits()
    owned = {} if owner is None else _owner_columns(owner)
    values: dict[str, Any] = {"status": run.status, "finished_at": None, **owned}
    if options is not None:
        values["options"] = dict(options)
    session.execute(update(Run).where(Run.id == run_id).values(values))
    return run_info(session, resumed.uuid)


def end_runs_of(session: Session, owner: RunOwner, *, at: datetime) -> int:
    """Mark the running runs of a process as interrupted; return their number."""
    lock_for_writing(session.connection())
    statement = (
        update(Run)
        .filter_by(status="running", **_owner_columns(owner))
        .values(status="interrupted", finished_at=at)
    )
    return session.connection().execute(statement).rowcount


def _owner_columns(owner: RunOwner) -> dict[str, str | int]:
    return {"owner_host": owner.host, "owner_pid": owner.pid, "owner_start": owner.start}


def advance_run(session: Session, run_uuid: str, status: str) -> None:
    """Set a run's status if it is later in the order running ... complete than the stored one."""
    earlier = _STATUS_ORDER[: _STATUS_ORDER.index(status)]
    session.execute(
        update(Run).where(Run.uuid == run_uuid, Run.status.in_(earlier)).values(status=status)
    )


def add_record(session: Session, record: AnyRecord) -> bool:
    """Store a record and the rows it references; return False if its uuid is stored.

    An environment that is new to the series of a measurement opens an epoch. A decode or serving
    record replaces a stored one with an earlier created_at. Raises RecordError if a field can't be
    stored, ConflictError if another run has the idempotency key of the record's run.
    """
    return add_records(session, [record]) == 1


def add_records(session: Session, records: Iterable[AnyRecord]) -> int:
    """Store records and return the number of new and replaced ones. Raises like add_record."""
    writer = Writer(session)
    writer.add_all(map(canonical, records))
    return writer.added


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """Numbers of results that were added and replaced, and the ids of their series."""

    added: int
    replaced: int
    series: frozenset[int]


def put_records(session: Session, records: Iterable[Record]) -> Written:
    """Store measurements; those that differ from a stored one of the same uuid replace it.

    Raises like add_record.
    """
    writer = Writer(session, replacing=True)
    writer.add_all(map(canonical, records))
    return Written(writer.added, writer.replaced, frozenset(writer.changed_series))


def projects_of_stored(session: Session, records: Iterable[AnyRecord]) -> set[str]:
    """Return the projects that records name, and those of the stored rows that they would change.

    These are runs with their uuid or idempotency key, and results of models with their uuid.
    """
    projects: set[str] = set()
    runs: set[str] = set()
    uuids: dict[type[AnyRecord], set[str]] = {}
    for record in records:
        # The project of a measurement is that of its series, whatever its commit says.
        projects.add(record.project if isinstance(record, Record) else record.commit.project)
        runs |= {record.run.uuid, record.run.idempotency_key}
        uuids.setdefault(type(record), set()).add(record.uuid)
    in_runs = select(Commit.project).join(Run, Run.commit_id == Commit.id)
    for part in _parts(runs):
        by_run = in_runs.where(Run.uuid.in_(part) | Run.idempotency_key.in_(part))
        projects.update(session.scalars(by_run.distinct()))
    for kind, of_kind in uuids.items():
        table: Any = FAMILIES[kind].table
        stored = select(Commit.project).join(table, table.commit_id == Commit.id)
        for part in _parts(of_kind):
            projects.update(session.scalars(stored.where(table.uuid.in_(part)).distinct()))
    return projects


def _parts(values: Iterable[str]) -> Iterator[list[str]]:
    some = sorted(values)
    for start in range(0, len(some), _IN_A_QUERY):
        yield some[start : start + _IN_A_QUERY]


def finish_run(
    session: Session, run_uuid: str, status: str, *, finished_at: datetime | None = None
) -> None:
    """Set the final status of a run; finished_at None: now.

    Raises NotFoundError if the run is not stored, RecordError if the status is unknown.
    """
    if status not in RUN_STATUSES:
        raise RecordError(f"status is {status!r}, not one of {', '.join(RUN_STATUSES)}")
    lock_for_writing(session.connection())
    run_id = stored_run_id(session, run_uuid)
    values = {"status": status, "finished_at": finished_at or datetime.now(UTC)}
    session.execute(update(Run).where(Run.id == run_id).values(values))
