"""Records as JSON lines: one object per line, UTF-8, plain or gzip."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn

from flexq_bench.db.encoding import decode_record, encode_record
from flexq_bench.db.errors import RecordError, RecordFormatError
from flexq_bench.db.gzip_files import DAMAGED, packing
from flexq_bench.db.records import AnyRecord

# Bounds of one record, after decoding; usual ones have some thousands of bytes and some hundred
# cells (values, lists, objects). A parsed cell takes up to 100 bytes of memory.
MAX_LINE_BYTES = 32 << 20
MAX_CELLS = 5 << 18
# Bounds of a gzip file. JSON of records shrinks to a tenth, or to a fiftieth if they are equal.
MAX_EXPANSION = 200
_MIN_BOUNDED_BYTES = 64 << 20  # decoded; smaller files may expand by any factor
_MAX_BLANK_LINES = 1000  # in a row


def count_cells(json_text: bytes | str) -> int:
    """Return the number of values, lists and objects in JSON that is not parsed yet, at most."""
    if isinstance(json_text, bytes):
        return sum(map(json_text.count, (b",", b"[", b"{")))
    return sum(map(json_text.count, ",[{"))


def record_line(record: AnyRecord, *, stored: bool = False) -> str:
    """Return a record as one line without newline. Floats have the shortest exact representation.

    stored: as of `encode_record`. Raises RecordError if a field can't be stored.
    """
    flat = encode_record(record, stored=stored)
    return json.dumps(flat, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def write(
    file: BinaryIO, records: Iterable[AnyRecord], *, compress: bool, stored: bool = False
) -> int:
    """Write the records and return their number. stored: as of `encode_record`."""
    count = 0
    with packing(file, compress=compress) as content:
        for record in records:
            content.write(record_line(record, stored=stored).encode() + b"\n")
            count += 1
    return count


def read(path: Path, *, compressed: bool) -> Iterator[AnyRecord]:
    """Iterate over the records of a file. Raises RecordFormatError with file and line, OSError."""
    number, has_record, blank, size = 0, False, 0, 0
    most = max(MAX_EXPANSION * path.stat().st_size, _MIN_BOUNDED_BYTES) if compressed else None
    try:
        with gzip.open(path) if compressed else path.open("rb") as file:
            lines = iter(partial(file.readline, MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, start=1):
                size += len(line)
                if most is not None and size > most:
                    raise _out_of_bounds(path, number, f"expands to more than {most:,} bytes")
                if len(line) > MAX_LINE_BYTES:
                    raise _out_of_bounds(path, number, f"a line of over {MAX_LINE_BYTES:,} bytes")
                if count_cells(line) > MAX_CELLS:
                    raise _out_of_bounds(path, number, f"a line of over {MAX_CELLS:,} values")
                blank = 0 if line.strip() else blank + 1
                if blank > _MAX_BLANK_LINES:
                    raise _out_of_bounds(path, number, f"over {_MAX_BLANK_LINES:,} blank lines")
                if not blank:
                    has_record = True
                    yield _record(line, path, number)
    except DAMAGED as error:
        raise RecordFormatError(
            f"{path}:{number + 1}: the gzip file is cut off or damaged ({error}): copy it again"
        ) from error
    if not has_record:
        raise RecordFormatError(f"{path}:1: the file is empty: copy it again")


def _out_of_bounds(path: Path, number: int, what: str) -> RecordFormatError:
    return RecordFormatError(f"{path}:{number}: {what}: this is not a file of FlexQ Bench results")


def _record(line: bytes, path: Path, number: int) -> AnyRecord:
    try:
        flat = json.loads(line, parse_constant=_refuse_constant)
        if not isinstance(flat, dict):
            raise RecordError("no JSON object: this is not a FlexQ Bench result")
        return decode_record(flat)
    except RecordError as error:
        raise RecordFormatError(f"{path}:{number}: {error}") from None
    except (ValueError, RecursionError):
        problem = (
            "not JSON: this is not a file of FlexQ Bench results"
            if line.endswith(b"\n")
            else "the line is cut off: copy the file again"
        )
        raise RecordFormatError(f"{path}:{number}: {problem}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise RecordError(f"{name} is no JSON number: only finite numbers are stored")
