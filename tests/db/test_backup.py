"""`db export --all` and its restoring: every table, row by row."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import JSON, BigInteger, insert, select

from flexq_bench.db.backup import is_backup, restore_backup, write_backup
from flexq_bench.db.copy import NotEmptyError
from flexq_bench.db.engine import open_database
from flexq_bench.db.errors import RecordFormatError
from flexq_bench.db.tables import Base

TABLES = Base.metadata.sorted_tables
ROWS = 2
VALUES: dict[type, Any] = {
    int: 1,
    bool: True,
    float: 0.1 + 0.2,
    str: 'text "of"\n\u2028 µ',
    bytes: b"\0\xff\n",
    datetime: datetime(2026, 2, 3, 4, 5, 6, 789_000, tzinfo=UTC),
}


def a_row(table, number):
    """Values of each column's type; ids and what must be unique are numbered."""
    row = {}
    for column in table.columns:
        if isinstance(column.type, JSON):
            row[column.name] = {"list": [1.5, None, "é"], "number": number}
            continue
        value = VALUES[getattr(column.type, "impl_instance", column.type).python_type]
        if column.foreign_keys or column.primary_key:
            value = number
        elif isinstance(value, str):
            value = f"{value} {number}"
        elif isinstance(value, int) and not isinstance(value, bool):
            value = number + (2**40 if isinstance(column.type, BigInteger) else 2**20)
        row[column.name] = None if column.nullable and number == ROWS else value
    return row


def rows_of(path):
    with open_database(path, read_only=True) as database, database.session() as session:
        return {
            table.name: [tuple(row) for row in session.execute(select(table))] for table in TABLES
        }


@pytest.fixture(scope="module")
def full(make_url):
    """A database with rows in every table that the schema has."""
    url = make_url()
    with open_database(url) as database, database.session() as session:
        for table in TABLES:
            rows = [a_row(table, number) for number in range(1, ROWS + 1)]
            session.connection().execute(insert(table), rows)
    return url


@pytest.fixture
def backed_up(full, tmp_path):
    def write(name="backup.jsonl.gz"):
        path = tmp_path / name
        with open_database(full, read_only=True) as database, database.session() as session:
            rows = write_backup(session, path, revision="r", on_rows=lambda rows: None)
        assert rows == ROWS * len(TABLES)
        return path

    return write


def restored(path, target, revision="r"):
    with open_database(target) as database, database.session() as session:
        return restore_backup(session, path, revision=revision, on_rows=lambda rows: None)


@pytest.mark.parametrize("name", ["backup.jsonl", "backup.jsonl.gz"])
@pytest.mark.parametrize("to_sqlite", [True, False])
def test_every_table_is_restored_as_it_was(full, backed_up, make_url, tmp_path, name, to_sqlite):
    path = backed_up(name)
    target = str(tmp_path / "new.sqlite") if to_sqlite else make_url()
    assert is_backup(path)

    assert restored(path, target) == ROWS * len(TABLES)

    before, after = rows_of(full), rows_of(target)
    assert set(before) == {table.name for table in TABLES}
    for table in before:
        assert len(before[table]) == ROWS, table
        assert after[table] == before[table], table


def test_backup_is_restored_only_into_an_empty_database(full, backed_up):
    with pytest.raises(NotEmptyError):
        restored(backed_up(), full)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda lines: lines[:-1], "cut off"),
        (lambda lines: [*lines[:-2], lines[-1]], "cut off"),
        (lambda lines: [*lines[:5], lines[5][:20], *lines[6:]], "damaged"),
        (lambda lines: [*lines[:5], '["no_table",{}]', *lines[5:]], "damaged"),
        (lambda lines: [lines[0].replace('"r"', '"s"'), *lines[1:]], "revision"),
    ],
)
def test_damaged_backup_restores_nothing(backed_up, make_url, damage, reason):
    path, target = backed_up(), make_url()
    lines = gzip.decompress(path.read_bytes()).decode().split("\n")[:-1]
    path.write_bytes(gzip.compress("\n".join([*damage(lines), ""]).encode()))

    with pytest.raises(RecordFormatError, match=reason):
        restored(path, target)

    assert not any(rows_of(target).values())


def test_results_file_is_no_backup(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"kernel": "flexq"}) + "\n")

    assert not is_backup(path)
    assert not is_backup(tmp_path / "missing.jsonl")
