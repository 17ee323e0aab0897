"""Operations that SQLite and PostgreSQL do differently: writer's lock, bulk insert, clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Table, insert, text
from sqlalchemy.orm import Session

# Arbitrary; must not be used for another advisory lock in the same PostgreSQL database.
_ADVISORY_KEY = 0x666C657871  # "flexq"
WRITER_SILENCE = "writer_silence"  # option of an engine of PostgreSQL: a time, with its unit
_LOCK = text(
    "SELECT set_config('idle_in_transaction_session_timeout', :silence, true), "
    "pg_advisory_xact_lock(:key)"
)


def lock_for_writing(connection: Connection) -> None:
    """Acquire the writer's lock until the transaction ends; no effect if it is already held.

    Writers select a row and insert it if it is missing. One writer at a time prevents duplicate
    inserts of the same series by two processes, and deadlocks. Waits up to the database's timeout;
    the driver's error then becomes LockedError. PostgreSQL ends the transaction of a writer that is
    silent for too long: a frozen one would keep the lock.
    """
    if connection.dialect.name == "postgresql":
        silence = connection.get_execution_options()[WRITER_SILENCE]
        connection.execute(_LOCK, {"key": _ADVISORY_KEY, "silence": silence})
        return
    # Python's driver begins a transaction only at the first INSERT: too late for the SELECT before.
    driver_connection = connection.connection.driver_connection
    if driver_connection is not None and not driver_connection.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def insert_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that all have the same columns; without rows no statement is executed.

    SQLite executes one prepared statement repeatedly. PostgreSQL receives all rows as one JSON
    parameter: on its server, a statement per row costs more than inserting the rows, and the driver
    would parse a statement with one parameter per value anew each time.
    """
    if not rows:
        return
    if connection.dialect.name != "postgresql":
        connection.execute(insert(table), rows)
        return
    quote = connection.dialect.identifier_preparer.quote
    columns, name = ", ".join(map(quote, rows[0])), quote(table.name)
    statement = (
        f"INSERT INTO {name} ({columns}) SELECT {columns} "
        f"FROM json_populate_recordset(CAST(NULL AS {name}), CAST(:rows AS json))"
    )
    connection.execute(text(statement), {"rows": json.dumps(rows, default=_as_json)})


def _as_json(value: object) -> str:
    """Return a value as text that PostgreSQL parses as timestamptz or bytea."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    raise TypeError(f"no column type for a {type(value).__name__}")


def database_time(session: Session) -> datetime:
    """Return the current UTC time of the database server, independent of this host's clock.

    For a SQLite file it is the clock of the host, which all its users share.
    """
    if session.connection().dialect.name != "postgresql":
        return datetime.now(UTC)
    # now() would return the start of the transaction, which may have waited for the writer's lock.
    moment: datetime = session.scalars(text("SELECT clock_timestamp()")).one()
    return moment.astimezone(UTC)
