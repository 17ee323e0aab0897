"""Reading of CSV files with one number per row."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from flexq_bench.errors import UsageError
from flexq_bench.runs.text_files import read_text
from flexq_bench.workloads.names import listed, unknown

LABELS = ("commit", "time", "device")  # columns that are read in addition to the number
_UNIT_STEPS = (1e3, 1e6, 1e9)  # of ns, µs, ms and s
_MAX_UNIT_DEVIATION = 1.6  # of a ratio from a factor between units
_GAPS = frozenset({"", "nan", "na", "n/a", "null", "none"})
_DELIMITERS = ",;\t"
_MAX_BYTES = 1 << 25  # millions of numbers
_MAX_CELL_LENGTH = 16  # in a message: a longer cell may be a secret


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of numbers, one per data row.

    name None: the file has no header. values: NaN for an empty cell or a marker of missing data.
    rows: line number of each value in the file, from 1. labels: the columns `commit`, `time` and
    `device`, if the file has them.
    """

    name: str | None
    values: tuple[float, ...]
    rows: tuple[int, ...]
    labels: dict[str, tuple[str, ...]]


def read_numbers(path: str, column: str | None = None) -> NumberColumn:
    """Read the column of that name; None: the only column that is not a label.

    A header is optional: the first row is a header if it contains no number. An empty row is a
    missing value; empty rows at the end are ignored. Raises UsageError, with the row if possible,
    for a file that can't be read, a missing column, a row with more cells than the first, and text
    among the numbers.
    """
    rows = _read(path)
    if not rows:
        raise UsageError(f"{path} holds no number: write one a row")
    first = [cell.strip() for cell in rows[0][1]]
    has_header = column is not None or not any(_is_number(cell) for cell in first)
    position = _position(path, first, column, has_header)
    name = first[position] if has_header else None
    data = rows[1:] if has_header else rows
    for line, cells in data:
        _check_width(path, line, cells, len(first))
    labels = {
        label: tuple(_cell(cells, first.index(label)) for _, cells in data)
        for label in LABELS
        if has_header and label in first and first.index(label) != position
    }
    if not data:
        raise UsageError(f"{path} holds no number: write one a row")
    values = tuple(_number(path, line, _cell(cells, position), name) for line, cells in data)
    return NumberColumn(name, values, tuple(line for line, _ in data), labels)


def series_warnings(numbers: NumberColumn) -> list[str]:
    """Return warnings of a file that may be no series: rows out of order, values of two units."""
    return [*_out_of_order(numbers), *_mixed_units(numbers)]


def _out_of_order(numbers: NumberColumn) -> list[str]:
    times = [_moment(text) for text in numbers.labels.get("time", ())]
    dated = [(moment, row) for moment, row in zip(times, numbers.rows, strict=False) if moment]
    backward = [row for (a, _), (b, row) in pairwise(dated) if b < a]
    if not backward:
        return []
    if len(backward) == len(dated) - 1:
        return ["the newest row is first: turn the file around"]
    return [
        f"{len(backward)} rows are older than the row before them, row {backward[0]} is the first: "
        "sort the file by time"
    ]


def _moment(text: str) -> float | None:
    """Parse a number, or an ISO 8601 date and time as a timestamp; None: it is neither."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _mixed_units(numbers: NumberColumn) -> list[str]:
    positive = [(v, row) for v, row in zip(numbers.values, numbers.rows, strict=True) if v > 0]
    if not positive:
        return []
    middle = statistics.median(value for value, _ in positive)
    for factor in _UNIT_STEPS:
        for sign, word in ((1, "larger"), (-1, "smaller")):
            odd = [
                row
                for value, row in positive
                if abs(sign * math.log(value / middle) - math.log(factor))
                < math.log(_MAX_UNIT_DEVIATION)
            ]
            if odd:
                return [
                    f"{len(odd)} values are about {factor:,.0f} times {word} than the others, "
                    f"row {odd[0]} is the first: are there two units?"
                ]
    return []


def _read(path: str) -> list[tuple[int, list[str]]]:
    """Line number and cells of each row, without empty rows at both ends."""
    text = read_text(path, "a CSV file", most_bytes=_MAX_BYTES, pipes=True)
    lines = text.splitlines()
    filled = next((line for line in lines if line.strip()), "")
    delimiter = max(_DELIMITERS, key=filled.count)
    try:
        reader = csv.reader(lines, delimiter=delimiter)
        rows = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise UsageError(f"can't read {path}: {error}: name a CSV file") from error
    while rows and not any(cell.strip() for cell in rows[-1][1]):
        rows.pop()
    while rows and not any(cell.strip() for cell in rows[0][1]):
        rows.pop(0)
    return rows


def _check_width(path: str, line: int, cells: Sequence[str], width: int) -> None:
    """Raise UsageError for extra cells, as a decimal comma would split a number into two."""
    beyond = [cell for cell in cells[width:] if cell.strip()]
    if beyond:
        raise UsageError(
            f"{path}: row {line} has {len(cells)} cells, the first row {width}: write numbers "
            "with a decimal point, and quote a cell that holds the separator"
        )


def _position(path: str, first: Sequence[str], column: str | None, has_header: bool) -> int:
    if column is not None:
        if column in first:
            return first.index(column)
        if any(_is_number(cell) for cell in first):
            raise UsageError(f"{path} has no header, so no column {column!r}: leave out --column")
        raise UsageError(
            f"{path}: {unknown('column', column, [_displayed(cell) for cell in first])}"
        )
    if has_header:
        choices = [i for i, cell in enumerate(first) if cell not in LABELS]
    else:
        choices = [i for i, cell in enumerate(first) if _is_number(cell)]
    if len(choices) == 1:
        return choices[0]
    if not choices:
        raise UsageError(f"{path} has no column of numbers, only {', '.join(first)}: add one")
    if has_header:
        names = listed([_displayed(first[i]) for i in choices])
        raise UsageError(f"{path} has several columns: choose one by --column: {names}")
    raise UsageError(f"{path} has {len(choices)} columns of numbers and no header: give it one")


def _cell(cells: Sequence[str], position: int) -> str:
    return cells[position].strip() if position < len(cells) else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _number(path: str, line: int, text: str, name: str | None) -> float:
    if text.lower() in _GAPS:
        return math.nan
    if not _is_number(text):
        where = "" if name is None else f" in column {_displayed(name)!r}"
        displayed = repr(text) if len(text) <= _MAX_CELL_LENGTH else _displayed(text)
        raise UsageError(
            f"{path}: row {line}: {displayed}{where} is no number: correct it, or leave the "
            "cell empty"
        )
    return float(text)


def _displayed(cell: str) -> str:
    """Format a cell for a message; of a long one only its length."""
    return cell if len(cell) <= _MAX_CELL_LENGTH else f"a text of {len(cell):,} characters"
