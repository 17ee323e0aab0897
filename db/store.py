"""Writing: a run, its plan, its records. Each call is safe beside other processes' calls.

A call holds the writer's lock from its start to the end of the session's transaction, so a
session that writes should be short: one record, or one file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from datetime import UTC, datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from db.encoding import canonical
from db.errors import NotFoundError, RecordError
from db.locking import lock_for_writing
from db.queries.runs import run_info
from db.records import RUN_STATUSES, CommitInfo, Record, RunInfo, RunOwner
from db.tables import Run
from db.writer import Writer

_TOWARDS_THE_END = ("running", "interrupted", "failed", "complete")


def begin_run(
    session: Session, run: RunInfo, commit: CommitInfo, owner: RunOwner | None = None
) -> RunInfo:
    """Declare a run and its plan, and say which run it became.

    owner: the process that has it from now on; None: nobody says.

    If a run with this idempotency key (or uuid) is stored, that one goes on: it is running again,
    planned cases that it lacked are appended, and its uuid comes back. Raises RecordError.
    """
    run = canonical(run)
    writer = Writer(session)
    stored = session.scalar(select(Run.uuid).where(Run.idempotency_key == run.idempotency_key))
    going_on = dataclasses.replace(run, uuid=stored or run.uuid)
    run_id = writer.run(going_on, writer.commit(canonical(commit)))
    owned = {} if owner is None else _owner_columns(owner)
    values = {"status": run.status, "finished_at": None, **owned}
    session.execute(update(Run).where(Run.id == run_id).values(values))
    return run_info(session, going_on.uuid)


def end_runs_of(session: Session, owner: RunOwner, *, at: datetime) -> int:
    """Mark the runs that a process left running as interrupted; how many there were."""
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
    """Give a run the status that somebody else knows of it, if it is further than its own."""
    earlier = _TOWARDS_THE_END[: _TOWARDS_THE_END.index(status)]
    session.execute(
        update(Run).where(Run.uuid == run_uuid, Run.status.in_(earlier)).values(status=status)
    )


def add_record(session: Session, record: Record) -> bool:
    """Store a record with all that it refers to; False: it was stored before, nothing changed.

    A record whose environment is new to its series opens an epoch. Raises RecordError if a field
    can't be stored, ConflictError if another run holds the idempotency key of the record's run.
    """
    writer = Writer(session)
    writer.add(canonical(record))
    writer.flush()
    return writer.added == 1


def add_records(session: Session, records: Iterable[Record]) -> int:
    """Store records in one go, and say how many are new. Raises as add_record."""
    writer = Writer(session)
    writer.add_all(map(canonical, records))
    return writer.added


def finish_run(
    session: Session, run_uuid: str, status: str, *, finished_at: datetime | None = None
) -> None:
    """Set the final status of a run; finished_at None: now.

    Raises NotFoundError if the run is not stored, RecordError if there is no such status.
    """
    if status not in RUN_STATUSES:
        raise RecordError(f"status is {status!r}, not one of {', '.join(RUN_STATUSES)}")
    lock_for_writing(session.connection())
    run_id = _run_id(session, run_uuid)
    values = {"status": status, "finished_at": finished_at or datetime.now(UTC)}
    session.execute(update(Run).where(Run.id == run_id).values(values))


def _run_id(session: Session, run_uuid: str) -> int:
    run_id = session.scalar(select(Run.id).where(Run.uuid == run_uuid))
    if run_id is None:
        raise NotFoundError(f"no run {run_uuid} is stored: name another database with --db")
    return run_id
