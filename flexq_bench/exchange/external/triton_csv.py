"""Triton: the wide CSV of `triton.testing.perf_report` (`run(save_path=…)`).

A row is of one size: first the columns of its parameters, then one for each provider, whose header
has the label of the axis in parentheses: `M,N,K,cuBLAS (TFLOPS),Triton (TFLOPS)`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from flexq_bench.db.units import is_rate
from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    MAX_BYTES,
    ExternalResult,
    Reading,
    by_unit,
    collect,
    split_parameters,
)
from flexq_bench.runs.text_files import read_text

_WHAT = "a CSV of triton.testing.perf_report, with the unit in its columns: Triton (TFLOPS)"
COLUMN = re.compile(r"(?=.*\)\Z)(.+?)(-min|-max)? \((.+)\)")
_UNIT = re.compile(r"(?<![^\s()])([^\s()]++)\)?\Z")  # the last word: ms of Latency (ms)


def read(path: str) -> Reading:
    """Read one result per row and provider; the benchmark's name is the file's.

    Rates are better if higher, times and others if lower. Raises UsageError if the file is of
    another format.
    """
    rows = list(csv.reader(io.StringIO(read_text(path, _WHAT, most_bytes=MAX_BYTES), newline=None)))
    header = rows[0] if rows else []
    columns = [COLUMN.fullmatch(name.strip()) for name in header]
    first = next((place for place, column in enumerate(columns) if column), 0)
    if not first:
        raise UsageError(f"{path} has no such columns: name {_WHAT}")
    entries = (
        (
            f"row {number}, {column[1]}",
            partial(_result, Path(path).stem, header, row, place, columns),
        )
        for number, row in enumerate(rows[1:], start=2)
        for place, column in enumerate(columns)
        if column is not None and not column[2] and any(row)
    )
    return collect(entries)


def _result(
    name: str,
    header: Sequence[str],
    row: Sequence[str],
    place: int,
    columns: Sequence[re.Match[str] | None],
) -> ExternalResult | None:
    column = columns[place]
    if column is None or row[place].strip().lower() in ("", "nan"):
        return None  # this provider has no such size
    n_parameters = next(index for index, column in enumerate(columns) if column)
    values = {header[index].strip(): _plain(row[index]) for index in range(n_parameters)}
    shape, variant = split_parameters(values)
    words = _UNIT.search(column[3])
    unit = words[1] if words else column[3]
    ends = {
        other[2]: by_unit(row[index], unit)["median"]
        for index, other in enumerate(columns)
        if other is not None and other[2] and other[1] == column[1]
    }
    return ExternalResult(
        name=name,
        variant=",".join(filter(None, (f"provider={column[1]}", variant))),
        shape=shape,
        **by_unit(row[place], unit, higher=True if is_rate(unit) else None),
        environment={"tool": "triton"},
        extra={"min": ends.get("-min"), "max": ends.get("-max")} if ends else {},
    )


def _plain(text: str) -> str:
    """Return a size that pandas wrote as 4096.0 or 4096.000000 as 4096."""
    return re.sub(r"\.0+$", "", text.strip())
