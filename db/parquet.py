"""Records as a Parquet file: flat fields as columns, nested objects as JSON text.

Samples are lists of lists of doubles, one list per placement.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flexq_bench.db.encoding import DEVICE_KEY, IN_UNIT, NESTED, decode_record, encode_record
from flexq_bench.db.errors import RecordError, RecordFormatError
from flexq_bench.db.identity import canonical_json
from flexq_bench.db.jsonlines import MAX_CELLS, MAX_LINE_BYTES, count_cells
from flexq_bench.db.records import SCHEMA_VERSION, AnyRecord, Record

_VERSION_KEY = b"flexq_bench.schema_version"
_BATCH = 1000  # rows in memory at once
# Values of a column in a row group, which Arrow decodes at once: 128 MB of doubles.
_MAX_GROUP_VALUES = 1 << 24
_ARROW = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
}


def _schema() -> pa.Schema:
    columns = {"schema_version": pa.int64()}
    for name, hint in get_type_hints(Record).items():
        if name in NESTED:
            columns[name] = pa.string()
        elif name != "device":
            columns[name] = _arrow_type(hint)
            if name in IN_UNIT:
                columns[IN_UNIT[name]] = columns[name]
    for name in (*(key for key, _ in NESTED.values()), DEVICE_KEY):
        columns[name] = pa.string()
    return pa.schema(columns.items(), metadata={_VERSION_KEY: str(SCHEMA_VERSION)})


def _arrow_type(hint: Any) -> Any:
    if NoneType in get_args(hint):
        hint = get_args(hint)[0]
    if get_origin(hint) is tuple:
        return pa.list_(_arrow_type(get_args(hint)[0]))
    return _ARROW.get(hint, pa.string())


SCHEMA = _schema()
_TEXTS = [field.name for field in SCHEMA if field.type == pa.string()]
_JSON_COLUMNS = frozenset(
    {"config", "extra", "environment", DEVICE_KEY, *(key for key, _ in NESTED.values())}
)


def write(file: BinaryIO, records: Iterable[AnyRecord], *, stored: bool = False) -> int:
    """Write the records and return their number. stored: as of `encode_record`.

    Raises RecordError.
    """
    count = 0
    texts: dict[str, tuple[object, str]] = {}
    rows = (_row(record, texts, stored=stored) for record in records)
    # Checksums of pages: without them a flipped bit of a sample is read as another number.
    options = {"compression": "zstd", "write_page_checksum": True}
    with pq.ParquetWriter(file, SCHEMA, **options) as writer:
        while batch := list(islice(rows, _BATCH)):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=SCHEMA))
            count += len(batch)
    return count


def read(path: Path) -> Iterator[AnyRecord]:
    """Iterate over the records of a file. Raises RecordFormatError with file and row, OSError."""
    try:
        # Texts stay in their dictionary: thousands of rows may share a text of megabytes.
        # A file of an earlier version lacks columns.
        texts = [name for name in _TEXTS if name in pq.read_schema(path).names]
        options: dict[str, Any] = {"page_checksum_verification": True, "read_dictionary": texts}
        with pq.ParquetFile(path, **options) as file:
            _check_schema(file.schema_arrow, path)
            _check_size(file.metadata, path)
            number = 0
            for batch in file.iter_batches(_BATCH):
                for part in _bounded_parts(batch, path, number):
                    for row in part.to_pylist():
                        number += 1
                        yield _record(row, path, number)
    # of to_pylist: text that is no UTF-8, a time that Python has no date or zone for
    except (pa.ArrowException, OSError, ValueError, LookupError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the file system, not of the content
        reason = str(error).splitlines()[0]
        raise RecordFormatError(
            f"{path}: the Parquet file is cut off or damaged: copy it again ({reason})"
        ) from error


def _check_schema(schema: pa.Schema, path: Path) -> None:
    version = (schema.metadata or {}).get(_VERSION_KEY)
    if version is None:
        raise RecordFormatError(f"{path}: not a Parquet file of FlexQ Bench results")
    if version != str(SCHEMA_VERSION).encode():
        raise RecordFormatError(
            f"{path}: schema_version is {version.decode(errors='replace')}, this version reads "
            f"{SCHEMA_VERSION}: export it again with a matching flexq-bench"
        )


def _check_size(metadata: Any, path: Path) -> None:
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        values = max(group.column(index).num_values for index in range(group.num_columns))
        if values > _MAX_GROUP_VALUES:
            raise RecordFormatError(
                f"{path}: {values:,} values in a row group, {_MAX_GROUP_VALUES:,} are the most: "
                "write it with fewer rows in each"
            )


def _bounded_parts(batch: pa.RecordBatch, path: Path, before: int) -> Iterator[pa.RecordBatch]:
    """Split a batch so that no part has more than a record's bounds allow, by the sizes of cells.

    before: number of rows before the batch. Raises RecordFormatError for a row beyond a bound.
    """
    sizes, counts = (np.zeros(batch.num_rows, np.int64) for _ in range(2))
    for column in batch.columns:
        lengths, values = _cell_sizes(column)
        sizes += lengths
        counts += values
    large = np.flatnonzero((sizes > MAX_LINE_BYTES) | (counts > MAX_CELLS))
    if large.size:
        raise RecordFormatError(
            f"{path}:{before + int(large[0]) + 1}: a row of over {MAX_LINE_BYTES:,} bytes or "
            f"{MAX_CELLS:,} values: this is not a file of FlexQ Bench results"
        )
    part = np.cumsum(sizes) // MAX_LINE_BYTES + np.cumsum(counts) // MAX_CELLS
    starts = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), batch.num_rows]
    for start, stop in pairwise(starts):
        yield batch.slice(start, stop - start)


def _cell_sizes(column: pa.Array) -> tuple[Any, Any]:
    """Return bytes and values of each cell of a column."""
    if pa.types.is_dictionary(column.type):
        lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
        return lengths.fill_null(0).to_numpy(zero_copy_only=False), 1
    if not pa.types.is_list(column.type):
        return 8, 1
    inner = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
    weights = _cell_sizes(pc.list_flatten(column))[1]
    weights = np.broadcast_to(weights, inner.shape)
    values = np.bincount(inner, weights + 1, len(column)).astype(np.int64)
    return 8 * values, values


def _row(
    record: AnyRecord, texts: dict[str, tuple[object, str]], *, stored: bool
) -> dict[str, Any]:
    """Return the cells of a row. texts: the last object of each column, and its JSON."""
    if not isinstance(record, Record):
        raise RecordError("a .parquet file holds measurements only: use .jsonl for other results")
    row = encode_record(record, stored=stored)
    for name in _JSON_COLUMNS & row.keys():
        if name not in texts or texts[name][0] is not row[name]:
            texts[name] = row[name], canonical_json(row[name])
        row[name] = texts[name][1]
    return row


def _record(row: Mapping[str, Any], path: Path, number: int) -> AnyRecord:
    try:
        flat = {
            name: _parsed(value) if name in _JSON_COLUMNS and value is not None else value
            for name, value in row.items()
        }
        return decode_record(flat)
    except RecordError as error:
        raise RecordFormatError(f"{path}:{number}: {error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordFormatError(f"{path}:{number}: a cell that is not JSON: {error}") from None


def _parsed(text: str) -> Any:
    if count_cells(text) > MAX_CELLS:
        raise RecordError(f"a cell of over {MAX_CELLS:,} values")
    return json.loads(text)
