"""CSV: one result per row, with a header.

Columns, in any order: `benchmark` and `value`; optional are `unit` (default us), `metric` (default
time), `direction` (lower or higher; required for metrics other than time), `low` and `high` (of the
95 % interval), `samples` (their number), `variant`, `m`, `n`, `k`, `gpu`, `cache` (cold or hot).

Columns are separated by commas, semicolons or tabs. Spreadsheets of locales that write 1,5 for 1.5
separate columns by semicolons. A file that is not separated by commas may therefore use a decimal
point or a decimal comma, but the same one for all of its numbers.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    MAX_BYTES,
    US,
    BadResult,
    ExternalResult,
    Reading,
    collect,
    count,
    in_us,
    number,
)
from flexq_bench.runs.text_files import read_text
from flexq_bench.workloads.names import listed, unknown

_WHAT = "a CSV file with the columns benchmark and value"
_NEEDED = ("benchmark", "value")
_COLUMNS = (
    *_NEEDED, "unit", "metric", "direction", "low", "high", "samples", "variant",
    "m", "n", "k", "gpu", "cache",
)  # fmt: skip
_NUMBERS = ("value", "low", "high", "samples", "m", "n", "k")
_SEPARATORS = (",", ";", "\t")
_SEPARATOR_LINE = re.compile(r"sep=(.)\r?\n")  # optional first line of spreadsheets: the separator
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+")


def read(path: str) -> Reading:
    """Read one result per row; empty rows are ignored. Raises UsageError for another header."""
    text = read_text(path, _WHAT, most_bytes=MAX_BYTES)
    if (separator_line := _SEPARATOR_LINE.match(text)) is not None:
        text = text[separator_line.end() :]
    rows, header, separator = _with_header(path, text)
    for name in header:
        if (other := re.search(r"[;\t|]", name)) is not None:
            raise UsageError(
                f"{path} has columns separated by {other[0]!r}: write commas, semicolons or tabs"
            )
        if name not in _COLUMNS:
            raise UsageError(f"{path}: {unknown('column', name[:40], _COLUMNS)}")
    missing = [name for name in _NEEDED if name not in header]
    if missing or len(set(header)) != len(header):
        wrong = f"no column {listed(missing)}" if missing else "a column twice"
        raise UsageError(f"{path} has {wrong}: name {_WHAT}")
    decimal = "." if separator == "," else _decimal(path, text, header, separator)
    return collect(_entries(path, rows, header, decimal, _cut_off_row(text, separator)))


def _with_header(path: str, text: str) -> tuple[Iterator[list[str]], list[str], str]:
    """Return the rows after the header, the header, and the separator of columns.

    The separator is the one with which the header has the required columns; if there is none, a
    comma. Raises UsageError if the text is no CSV.
    """
    candidates = []
    for separator in _SEPARATORS:
        rows = csv.reader(io.StringIO(text, newline=None), delimiter=separator)
        try:
            # Spreadsheets may write upper case, and empty columns at the end.
            header = _without_empty_end([name.strip().lower() for name in next(rows, [])])
        except csv.Error:
            raise UsageError(f"{path} is no CSV: name {_WHAT}") from None
        candidates.append((rows, header, separator))
    return next(
        (candidate for candidate in candidates if set(_NEEDED) & set(candidate[1])), candidates[0]
    )


def _decimal(path: str, text: str, header: list[str], separator: str) -> str:
    """Return the decimal separator of a file whose columns are not separated by commas.

    Raises UsageError if it is ambiguous.
    """
    first: dict[str, str] = {}  # first number with this separator, and its row
    has_fraction = False
    rows = csv.reader(io.StringIO(text, newline=None), delimiter=separator)
    with suppress(csv.Error):  # reported when the row is read
        for place, row in islice(enumerate(rows, start=1), 1, None):
            named_cells = zip(header, row, strict=False)
            for cell in (cell.strip() for name, cell in named_cells if name in _NUMBERS):
                for sign in ",.":
                    if sign in cell:
                        first.setdefault(sign, f"{cell[:20]!r} in row {place}")
                has_fraction = has_fraction or ("," in cell and not _THOUSANDS.fullmatch(cell))
    if len(first) > 1:
        raise UsageError(
            f"{path} has {first[',']} and {first['.']}: write one decimal sign, and none between "
            "thousands"
        )
    if separator == "\t" and "," in first and not has_fraction:
        raise UsageError(
            f"{path} has {first[',']}, which may be thousands or a fraction: write decimal points"
        )
    return "," if "," in first else "."


def _entries(
    path: str, rows: Iterator[list[str]], header: list[str], decimal: str, cut_off_row: int
) -> Iterator[tuple[str, Callable[[], ExternalResult]]]:
    place = 1
    while True:
        place += 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error:
            raise UsageError(f"{path}: row {place} is no CSV: name {_WHAT}") from None
        if any(cell.strip() for cell in row):
            is_cut_off = place == cut_off_row and len(row) < len(header)
            yield f"row {place}", partial(_result, row, header, decimal, is_cut_off)


def _cut_off_row(text: str, separator: str) -> int:
    """Return the number of the last row if its line has no end, so that it may be cut off; else 0.

    Programs end the last line, too; an editor may not.
    """
    if text.endswith(("\n", "\r")):
        return 0
    with suppress(csv.Error):  # reported when the row is read
        return sum(1 for _ in csv.reader(io.StringIO(text, newline=None), delimiter=separator))
    return 0


def _without_empty_end(row: list[str]) -> list[str]:
    filled = [place for place, cell in enumerate(row, start=1) if cell.strip()]
    return row[: max(filled, default=0)]


def _result(row: list[str], header: list[str], decimal: str, is_cut_off: bool) -> ExternalResult:
    if is_cut_off:
        raise BadResult("the file is cut off within it: copy it again")
    row = _without_empty_end(row)
    if len(row) > len(header):
        raise BadResult(f"it has {len(row)} cells, the header has {len(header)}")
    fields = {name: cell.strip() for name, cell in zip(header, row, strict=False) if cell.strip()}
    if decimal != ".":
        fields |= {name: fields[name].replace(decimal, ".") for name in _NUMBERS if name in fields}
    if "benchmark" not in fields or "value" not in fields:
        raise BadResult("it has no benchmark, or no value")
    metric, unit = fields.get("metric", "time"), fields.get("unit", "us")
    if metric == "time":
        if fields.get("direction", "lower") != "lower":
            raise BadResult("less time is better: its direction is lower")
        factor = in_us(1, unit, "1")
        unit = "us"
    else:
        factor = 1.0
        if unit in US and "unit" not in fields:
            raise BadResult(f"the unit of {metric} is missing: add a column unit")
        if "direction" not in fields:
            raise BadResult(f"{metric} needs a column direction: lower or higher is better")
    cache = fields.get("cache", "")
    if cache not in ("", "cold", "hot"):
        raise BadResult("its cache is neither cold nor hot")
    return ExternalResult(
        name=fields["benchmark"],
        variant=fields.get("variant", ""),
        median=number(fields["value"], "value") * factor,
        low=_end(fields, "low", factor),
        high=_end(fields, "high", factor),
        n_samples=count(fields.get("samples", 0), "samples"),
        metric=metric,
        unit=unit,
        direction=fields.get("direction", "lower"),
        cache=cache,
        shape=(_size(fields, "m"), _size(fields, "n"), _size(fields, "k")),
        device=fields.get("gpu", ""),
        environment={"tool": "csv"},
    )


def _end(fields: Mapping[str, str], name: str, factor: float) -> float | None:
    return number(fields[name], name) * factor if name in fields else None


def _size(fields: Mapping[str, str], name: str) -> int:
    return count(fields.get(name, 1), name)
