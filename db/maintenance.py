"""Size of a database, and pruning of raw samples. Summaries are never deleted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, select, text
from sqlalchemy.orm import Session

from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.engine import Database
from flexq_bench.db.schema import current_revision
from flexq_bench.db.tables import Base, Measurement, Sample
from flexq_bench.db.translate import translated


@dataclass(frozen=True, slots=True)
class DatabaseStats:
    """Statistics of a database. size_bytes: on disk. rows: by table, sorted by name."""

    revision: str | None  # None: there are no tables
    size_bytes: int
    rows: dict[str, int]


def stats(session: Session) -> DatabaseStats:
    """Return rows per table, size on disk and schema revision."""
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
    """Delete raw samples and return the number of measurements that had them.

    older_than: only of measurements made before this time. keep_accepted: only of measurements that
    are not accepted. Raises ValueError if neither is given: that would delete all samples.
    """
    if older_than is None and not keep_accepted:
        raise ValueError("prune needs an age, or to keep the samples of accepted results")
    lock_for_writing(session.connection())
    selected = select(Measurement.id)
    if older_than is not None:
        selected = selected.where(Measurement.created_at < older_than)
    if keep_accepted:
        selected = selected.where(~Measurement.accepted)
    count = select(func.count()).where(Sample.measurement_id.in_(selected))
    pruned = session.scalars(count).one()
    session.execute(
        delete(Sample).where(Sample.measurement_id.in_(selected)),
        execution_options={"synchronize_session": False},
    )
    return pruned


def compact(database: Database) -> None:
    """Return the space of deleted rows to the file system. Raises LockedError beside a writer."""
    with translated(database.url), database.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        connection.execute(text("VACUUM"))
