"""Tables of each kind of record, and conversion between the fields of a record and its columns.

A field is stored in the column of its name, as JSON if it is a list or a mapping; the raw samples
of a record have a table of their own. `run`, `commit`, `device` and `environment` are references to
rows that records share (db.writer). To add a kind of record: its dataclass and its name in files
(db.records), its tables (db.tables) with a migration, and its entry in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from sqlalchemy import inspect

from flexq_bench.db.encoding import plain_value
from flexq_bench.db.records import (
    AccuracyRecord,
    AnyRecord,
    DecodeRecord,
    GateRecord,
    ProcessDecode,
    Record,
    ServingRecord,
)
from flexq_bench.db.samples import pack, unpack
from flexq_bench.db.tables import (
    AccuracyGate,
    AccuracyResult,
    AccuracySample,
    DecodeResult,
    DecodeSample,
    Measurement,
    Sample,
    ServingResult,
)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Samples:
    """Raw samples of a record: their field, their table, and the conversion of one to the other.

    result_id: name of the table's column with the id of the result.
    """

    field: str
    table: Any
    result_id: str
    to_rows: Callable[[Any], list[Row]]
    from_rows: Callable[[Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of record and its tables.

    is_replaced: a record takes the place of a stored one with its uuid and an earlier created_at,
    as a resumed run writes it again; else the first one is kept.
    """

    table: Any
    samples: Samples | None = None
    is_replaced: bool = False


def _placement_rows(placements: Sequence[Sequence[float]]) -> list[Row]:
    counts = [len(placement) for placement in placements]
    row = {"count": sum(counts), "placement_counts": counts, "data": pack(placements)}
    return [row] if placements else []


def _value_rows(values: Sequence[float]) -> list[Row]:
    return [{"count": len(values), "data": pack((values,))}] if values else []


def _process_rows(processes: Sequence[ProcessDecode]) -> list[Row]:
    rows = []
    for process in processes:
        row = plain_value(process)
        steps = row.pop("step_ms")
        rows.append(row | {"count": len(steps), "data": pack((steps,))})
    return rows


def _processes(rows: Sequence[DecodeSample]) -> tuple[ProcessDecode, ...]:
    names = [field.name for field in fields(ProcessDecode) if field.name != "step_ms"]
    return tuple(
        ProcessDecode(
            **{name: getattr(row, name) for name in names}, step_ms=unpack(row.data, [row.count])[0]
        )
        for row in sorted(rows, key=lambda row: row.number)
    )


FAMILIES: Mapping[type, Family] = {
    Record: Family(
        Measurement,
        Samples(
            *("samples_us", Sample, "measurement_id", _placement_rows),
            lambda rows: unpack(rows[0].data, rows[0].placement_counts) if rows else (),
        ),
    ),
    AccuracyRecord: Family(
        AccuracyResult,
        Samples(
            *("values", AccuracySample, "accuracy_result_id", _value_rows),
            lambda rows: unpack(rows[0].data, [rows[0].count])[0] if rows else (),
        ),
    ),
    DecodeRecord: Family(
        DecodeResult,
        Samples("processes", DecodeSample, "decode_result_id", _process_rows, _processes),
        is_replaced=True,
    ),
    ServingRecord: Family(ServingResult, is_replaced=True),
    GateRecord: Family(AccuracyGate),
}


@cache
def _stored_names(kind: Any, table: Any) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the fields of a record that are columns, and the items of those that have several.

    The type of an item is None if it is stored as it is.
    """
    hints = _stored_fields(kind, table)
    items = {name: get_args(hints[name])[0] for name in hints if get_origin(hints[name]) is tuple}
    return tuple(hints), {name: i if is_dataclass(i) else None for name, i in items.items()}


@cache
def _stored_fields(kind: Any, table: Any) -> Mapping[str, Any]:
    """Return the type of each field of a record that is a column of the table."""
    columns: list[str] = inspect(table).column_attrs.keys()
    hints = get_type_hints(kind)
    return {name: hints[name] for name in hints if name in columns and name != "created_at"}


def column_values(record: AnyRecord) -> Row:
    """Return the columns of a record's row, without references and creation time."""
    kind: Any = type(record)
    names, nested = _stored_names(kind, FAMILIES[kind].table)
    row = {name: getattr(record, name) for name in names}
    return row | {name: plain_value(row[name]) for name in nested}


def stored_columns(kind: Any, table: Any) -> list[Any]:
    """Return the columns of a table that hold fields of a record, as `field_values` takes them."""
    return [getattr(table, name) for name in _stored_names(kind, table)[0]]


def field_values(kind: Any, table: Any, cells: Sequence[Any]) -> Row:
    """Return the fields of a record from `stored_columns` of a row of its table, or its series."""
    names, nested = _stored_names(kind, table)
    values = dict(zip(names, cells, strict=True))
    for name, item in nested.items():
        entries = values[name]
        values[name] = tuple(entries) if item is None else tuple(item(**e) for e in entries)
    return values
