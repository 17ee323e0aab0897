"""Backup of a whole database as JSON lines: every row of every table, with its ids.

The first line names the revision of the schema, the last one the number of rows. Between them, a
line is the name of a table and a row of it; rows are in the order of the tables' references.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from io import BufferedReader
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import Table, insert, select, text

from flexq_bench.db.copy import ROWS, begin_copy, end_copy
from flexq_bench.db.engine import Session
from flexq_bench.db.errors import RecordFormatError, ResultsFileError
from flexq_bench.db.exchange import replacing
from flexq_bench.db.gzip_files import DAMAGED, packing, unpacked
from flexq_bench.db.tables import Base

_FORMAT = "flexq-bench-backup"


def write_backup(
    session: Session, path: str | Path, *, revision: str, on_rows: Callable[[int], None]
) -> int:
    """Write all rows to a file, gzip-compressed if its name ends in .gz; return their number.

    The rows are those of one moment, also while others write. Raises ResultsFileError.
    """
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
    else:
        connection.exec_driver_sql("BEGIN")  # Python's driver begins none for a SELECT
    count = 0
    with replacing(path) as raw, packing(raw, compress=str(path).endswith(".gz"), level=6) as file:
        _write(file, {_FORMAT: 1, "revision": revision})
        for table in Base.metadata.sorted_tables:
            names = [column.name for column in table.columns]
            result = connection.execution_options(yield_per=ROWS).execute(select(table))
            for part in result.partitions(ROWS):
                for row in part:
                    _write(file, [table.name, dict(zip(names, map(_plain, row), strict=True))])
                count += len(part)
                on_rows(len(part))
        _write(file, {"rows": count})
    return count


def is_backup(path: str | Path) -> bool:
    """Return True if a file begins as a backup does."""
    try:
        with _lines(Path(path)) as file:
            return file.readline(200).startswith(f'{{"{_FORMAT}"'.encode())
    except (OSError, *DAMAGED):
        return False


def restore_backup(
    session: Session, path: str | Path, *, revision: str, on_rows: Callable[[int], None]
) -> int:
    """Store the rows of a backup in an empty database, in one transaction; return their number.

    Raises NotEmptyError, RecordFormatError if the file is damaged or of another revision,
    ResultsFileError if it can't be read.
    """
    connection = begin_copy(session)
    tables = {table.name: table for table in Base.metadata.sorted_tables}
    count, number, whole = 0, 1, False
    try:
        with _lines(Path(path)) as file:
            header = json.loads(file.readline())
            if header.get("revision") != revision:
                raise RecordFormatError(
                    f"{path} is of revision {header.get('revision')}, this version has {revision}: "
                    "restore it with the version that wrote it, then `flexq-bench db upgrade`"
                )
            for name, lines in groupby(map(json.loads, file), _table_of):
                rows: list[dict[str, Any]] = []
                for line in lines:
                    number += 1
                    if not name:
                        whole = line == {"rows": count}
                        continue
                    rows.append(_row(tables[name], line[1]))
                    if len(rows) == ROWS:
                        connection.execute(insert(tables[name]), rows)
                        on_rows(len(rows))
                        count, rows = count + len(rows), []
                if rows:
                    connection.execute(insert(tables[name]), rows)
                    on_rows(len(rows))
                    count += len(rows)
    except (*DAMAGED, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordFormatError(
            f"{path}:{number + 1}: the backup is damaged: copy it again"
        ) from error
    except OSError as error:
        raise ResultsFileError(f"can't read {path}: {error.strerror or error}") from error
    if not whole:
        raise RecordFormatError(f"{path}:{number}: the backup is cut off: copy it again")
    end_copy(connection)
    return count


def _table_of(line: Any) -> str:
    return str(line[0]) if isinstance(line, list) else ""


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def _row(table: Table, values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value if value is None else _PARSERS.get(_kind(table, name), _same)(value)
        for name, value in values.items()
    }


def _kind(table: Table, name: str) -> type:
    kind = table.columns[name].type
    return getattr(kind, "impl_instance", kind).python_type  # of a type decorator


def _same(value: Any) -> Any:
    return value


_PARSERS: dict[type, Callable[[Any], Any]] = {
    datetime: datetime.fromisoformat,
    bytes: base64.b64decode,
}


def _write(file: BinaryIO, value: Any) -> None:
    file.write(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")


@contextmanager
def _lines(path: Path) -> Iterator[BufferedReader]:
    with path.open("rb") as file, unpacked(file) as content:
        yield content
