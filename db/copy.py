"""Copy a whole database to another one, for example a SQLite file to a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, func, insert, select, text

from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.engine import Session
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.tables import Base

ROWS = 1000  # per statement


class NotEmptyError(DatabaseError):
    """The database to copy to has rows already."""


def copy_database(source: Session, target: Session, *, on_rows: Callable[[int], None]) -> int:
    """Copy all rows of all tables, with their ids; return their number.

    Both have the tables of this version. on_rows: called with the number of rows of each part. The
    copy is one transaction of the target. Raises NotEmptyError.
    """
    reading, writing = source.connection(), begin_copy(target)
    copied = 0
    for table in Base.metadata.sorted_tables:
        result = reading.execution_options(yield_per=ROWS).execute(select(table))
        for part in result.mappings().partitions(ROWS):
            rows: list[dict[str, Any]] = [dict(row) for row in part]
            writing.execute(insert(table), rows)
            copied += len(rows)
            on_rows(len(rows))
    end_copy(writing)
    return copied


def begin_copy(target: Session) -> Connection:
    """Lock a database for writing. Raises NotEmptyError if a table has rows."""
    writing = target.connection()
    lock_for_writing(writing)
    for table in Base.metadata.sorted_tables:
        if writing.execute(select(table).limit(1)).first() is not None:
            raise NotEmptyError(f"the table {table.name} has rows already: copy to a new database")
    return writing


def end_copy(writing: Connection) -> None:
    """Make new ids follow those that were copied."""
    if writing.dialect.name == "postgresql":
        _continue_sequences(writing)


def _continue_sequences(connection: Connection) -> None:
    for table in Base.metadata.sorted_tables:
        for column in table.primary_key.columns:
            if column.type.python_type is not int:
                continue
            named = select(func.pg_get_serial_sequence(f'"{table.name}"', column.name))
            sequence = connection.scalar(named)
            highest = connection.scalar(select(func.max(column)))
            if sequence is not None and highest is not None:
                connection.execute(
                    text("SELECT setval(:sequence, :highest)"),
                    {"sequence": sequence, "highest": highest},
                )
