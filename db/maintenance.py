"""Size of a database, and pruning of raw samples. Summaries are never deleted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, select, text
from sqlalchemy.orm import Session

from db.engine import Database
from db.locking import lock_for_writing
from db.schema import current_revision
from db.tables import Base, Measurement, Sample
from db.translate import translated


@dataclass(frozen=True, slots=True)
class DatabaseStats:
    """size_bytes: what the database takes on disk. rows: by table, in the order of their names."""

    revision: str | None  # None: it holds no tables
    size_bytes: int
    rows: dict[str, int]


def stats(session: Session) -> DatabaseStats:
    """Rows of every table, size on disk and schema revision."""
    connection = session.connection()
    rows = {
        table.name: session.scalars(select(func.count()).select_from(table)).one()
        for table in sorted(Base.metadata.tables.values(), key=lambda table: table.name)
    }
    if connection.dialect.name == "postgresql":
        size = session.scalars(text("SELECT pg_database_size(current_database())")).one()
    else:
        pages = session.scalars(text("PRAGMA page_count")).one()
        size = pages * session.scalars(text("PRAGMA page_size")).one()
    return DatabaseStats(current_revision(connection), size, rows)


def prune_samples(
    session: Session, *, older_than: datetime | None = None, keep_accepted: bool = False
) -> int:
    """Delete raw samples and say of how many measurements.

    older_than: only of measurements made before it. keep_accepted: only of those that may not be
    compared. Raises ValueError if neither is given: that would delete all samples there are.
    """
    if older_than is None and not keep_accepted:
        raise ValueError("prune needs an age, or to keep the samples of accepted results")
    lock_for_writing(session.connection())
    doomed = select(Measurement.id)
    if older_than is not None:
        doomed = doomed.where(Measurement.created_at < older_than)
    if keep_accepted:
        doomed = doomed.where(~Measurement.accepted)
    count = select(func.count()).where(Sample.measurement_id.in_(doomed))
    pruned = session.scalars(count).one()
    session.execute(
        delete(Sample).where(Sample.measurement_id.in_(doomed)),
        execution_options={"synchronize_session": False},
    )
    return pruned


def compact(database: Database) -> None:
    """Give the space of deleted rows back to the disk. Raises LockedError beside a writer."""
    with translated(database.url), database.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        connection.execute(text("VACUUM"))
