"""Results files: read, write and import the records of `run --json` and `db export`."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeVar

from sqlalchemy.orm import Session

from flexq_bench.db import jsonlines
from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.engine import Database
from flexq_bench.db.errors import ResultsFileError
from flexq_bench.db.jsonlines import record_line
from flexq_bench.db.records import AnyRecord, RunInfo
from flexq_bench.db.store import add_records, advance_run
from flexq_bench.db.writer import Writer

__all__ = [
    "ImportSummary",
    "import_file",
    "import_in_parts",
    "read_records",
    "record_line",
    "replacing",
    "write_records",
]

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_PARQUET_SUFFIX = ".parquet"
_GZIP_SUFFIX = ".gz"
_A_TRANSACTION = 1_000  # records
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """Summary of an import. read = added + records that were already stored."""

    path: str
    read: int
    added: int
    runs: tuple[str, ...]  # uuids, in the order of the file


def read_records(path: str | Path) -> Iterator[AnyRecord]:
    """Iterate over the records of a .jsonl, .jsonl.gz or .parquet file.

    Raises RecordFormatError with file and line if the file is truncated, of another schema version
    or not a results file; ResultsFileError if it can't be opened or has another suffix.
    """
    source = Path(path)
    kind, compressed = _format(source)
    with _opening("read", source):
        if kind == _PARQUET_SUFFIX:
            from flexq_bench.db import parquet  # importing pyarrow takes 0.1 s

            yield from parquet.read(source)
        else:
            yield from jsonlines.read(source, compressed=compressed)


def write_records(path: str | Path, records: Iterable[AnyRecord], *, stored: bool = False) -> int:
    """Write records to a .jsonl, .jsonl.gz or .parquet file and return their number.

    stored: they were read from a database, so they are not checked again. The complete file
    replaces an existing one atomically. Raises RecordError for a record that can't be stored,
    ResultsFileError if the file can't be written.
    """
    target = Path(path)
    kind, compressed = _format(target)
    with _opening("write", target), _replacing(target) as file:
        if kind == _PARQUET_SUFFIX:
            from flexq_bench.db import parquet  # slow import, see read_records

            return parquet.write(file, records, stored=stored)
        return jsonlines.write(file, records, compress=compressed, stored=stored)


def import_file(session: Session, path: str | Path) -> ImportSummary:
    """Store the records of a file, all or none; records already stored are left unchanged.

    The file is read twice: before the database is locked for other writers, so that a file which
    can't be stored or takes long to read locks nobody out, and to store the records. The status of
    a run advances to the one in the file, if that is later (see advance_run).
    Raises what `read_records` and `add_record` raise.
    """
    deque(read_records(path), maxlen=0)
    lock_for_writing(session.connection())
    runs: dict[str, str] = {}
    read = 0
    with session.begin_nested():
        writer = Writer(session)
        for record in read_records(path):
            writer.add(record)
            runs[record.run.uuid] = record.run.status
            read += 1
        writer.flush()
        writer.place_commits()
        for uuid, status in runs.items():
            advance_run(session, uuid, status)
    return ImportSummary(str(path), read, writer.added, tuple(runs))


def import_in_parts(database: Database, path: str | Path) -> ImportSummary:
    """Store the records of a file in short transactions, so that others write meanwhile.

    A file that can't be stored stores nothing: all of it is read, and its runs are looked up,
    before the first part is stored. An import that was interrupted is completed by repeating it.
    Raises like `import_file`.
    """
    runs: dict[str, RunInfo] = {}
    for record in read_records(path):
        runs[record.run.uuid] = record.run
    for part in _batches(runs.values()):
        with database.session() as session:
            Writer(session).stored_runs(part)
    read = added = 0
    for records in _batches(read_records(path)):
        with database.session() as session:
            read, added = read + len(records), added + add_records(session, records)
    with database.session() as session:
        for run in runs.values():
            advance_run(session, run.uuid, run.status)
    return ImportSummary(str(path), read, added, tuple(runs))


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    remaining = iter(items)
    while batch := list(islice(remaining, _A_TRANSACTION)):
        yield batch


def _format(path: Path) -> tuple[str, bool]:
    """Return the format's suffix, and whether the file is gzip-compressed."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = suffixes[-1:] == [_GZIP_SUFFIX]
    kind = suffixes[-2:-1] if compressed else suffixes[-1:]
    if kind and (kind[0] in _JSON_SUFFIXES or (kind[0] == _PARQUET_SUFFIX and not compressed)):
        return kind[0], compressed
    raise ResultsFileError(f"{path} has no known suffix: use .jsonl, .jsonl.gz or .parquet")


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` if the block does not raise.

    Raises ResultsFileError if it can't be written.
    """
    with _opening("write", Path(path)), _replacing(Path(path)) as file:
        yield file


@contextmanager
def _opening(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResultsFileError(f"can't {verb} {path}: {error.strerror or error}") from error


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside the target that replaces it if the block does not raise."""
    resolved = target.resolve()  # a symbolic link stays one
    partial = resolved.with_name(f".{resolved.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(resolved)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
