"""Bulk insert with one short statement, in the form that is fastest for each database."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, insert, text


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
