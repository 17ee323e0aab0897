"""CSV, and JSON lines: one result per row, with its commit, time, branch and device.

Columns, in any order: `benchmark` and `value`; optional are `unit` (default us), `metric` (default
time), `direction` (lower or higher; required for metrics other than time), `scale` (ratio, count or
difference, of metrics whose unit does not say it), `low` and `high` (of the
95 % interval), `samples` (their number), `variant`, `m`, `n`, `k`, `device` (or `gpu`), `cache`
(cold or hot), `commit`, `branch`, `time` (ISO 8601) and `occasion`. A line of JSON is an object
with these keys. Files are read in parts, so that they may have millions of rows.

Columns are separated by commas, semicolons or tabs. Spreadsheets of locales that write 1,5 for 1.5
separate columns by semicolons. A file that is not separated by commas may therefore use a decimal
point or a decimal comma, but the same one for all of its numbers.
"""

from __future__ import annotations

import csv
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain, islice

from flexq_bench.db.records import CommitInfo
from flexq_bench.db.units import RATIO, with_scale
from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    BATCH,
    BadResult,
    ExternalResult,
    Reading,
    collect_batches,
    commit_of,
    count,
    in_us,
    iso_time,
    number,
)
from flexq_bench.runs.text_files import text_lines
from flexq_bench.workloads.names import listed, unknown

_WHAT = "a CSV file with the columns benchmark and value"
_JSON_WHAT = "JSON lines, each an object with the keys benchmark and value"
_NEEDED = ("benchmark", "value")
_COLUMNS = (
    *_NEEDED, "unit", "metric", "direction", "scale", "low", "high", "samples", "variant",
    "m", "n", "k", "device", "gpu", "cache", "commit", "branch", "time", "occasion",
)  # fmt: skip
_NUMBERS = ("value", "low", "high", "samples", "m", "n", "k")
_SEPARATORS = (",", ";", "\t")
_SEPARATOR_LINE = re.compile(r"sep=(.)\r?\n")  # optional first line of spreadsheets: the separator
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+")
_MAX_BYTES = 1 << 30  # per file


class _Lines:
    """Lines of a file, one at a time.

    is_cut_off: the last one that was read has no end. It may be cut off, because programs end the
    last line, too; an editor may not.
    """

    def __init__(self, path: str) -> None:
        self._lines = text_lines(path, _WHAT, most_bytes=_MAX_BYTES)
        self.is_cut_off = False

    def __iter__(self) -> Iterator[str]:
        for place, line in enumerate(self._lines):
            self.is_cut_off = not line.endswith(("\n", "\r"))
            if place or not _SEPARATOR_LINE.fullmatch(line):
                yield line


def read_csv(path: str) -> Iterator[Reading]:
    """Read one result per row, in parts; empty rows are ignored.

    Raises UsageError for another header.
    """
    header, separator = _header(path)
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
    decimal = "." if separator == "," else _decimal(path, header, separator)
    return collect_batches(_entries(path, header, separator, decimal), BATCH)


def read_json_lines(path: str) -> Iterator[Reading]:
    """Read one result per line, in parts. Raises UsageError if the first one is no such object."""
    every_line = enumerate(text_lines(path, _JSON_WHAT, most_bytes=_MAX_BYTES), start=1)
    lines = (numbered for numbered in every_line if numbered[1].strip())
    place, first = next(lines, (1, ""))
    try:
        is_object = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object or not all(f'"{name}"' in first for name in _NEEDED):
        raise UsageError(f"{path} does not begin with a result: name {_JSON_WHAT}")
    entries = (
        (f"line {place}", partial(_of_line, line)) for place, line in chain([(place, first)], lines)
    )
    return collect_batches(entries, BATCH)


def _of_line(line: str) -> ExternalResult:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise BadResult("it is no JSON: copy the file again") from None
    if not isinstance(fields, dict):
        raise BadResult("it is no object")
    strange = [name for name in fields if name not in _COLUMNS]
    if strange:
        raise BadResult(unknown("key", str(strange[0])[:40], _COLUMNS))
    return _of_fields(
        {name: str(value) for name, value in fields.items() if value is not None}, "jsonl"
    )


def _header(path: str) -> tuple[list[str], str]:
    """Return the header of a file, and the separator of its columns.

    The separator is the one with which the header has the required columns; if there is none, a
    comma. Raises UsageError if the file is no CSV.
    """
    candidates = []
    for separator in _SEPARATORS:
        try:
            names = next(csv.reader(iter(_Lines(path)), delimiter=separator), [])
        except csv.Error:
            raise UsageError(f"{path} is no CSV: name {_WHAT}") from None
        # Spreadsheets may write upper case, and empty columns at the end.
        header = _without_empty_end([name.strip().lower() for name in names])
        candidates.append((header, separator))
    return next(
        (candidate for candidate in candidates if set(_NEEDED) & set(candidate[0])), candidates[0]
    )


def _decimal(path: str, header: list[str], separator: str) -> str:
    """Return the decimal separator of a file whose columns are not separated by commas.

    Raises UsageError if it is ambiguous.
    """
    first: dict[str, str] = {}  # first number with this separator, and its row
    has_fraction = False
    rows = csv.reader(iter(_Lines(path)), delimiter=separator)
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
    path: str, header: list[str], separator: str, decimal: str
) -> Iterator[tuple[str, Callable[[], ExternalResult]]]:
    lines = _Lines(path)
    rows = csv.reader(iter(lines), delimiter=separator)
    place = 0
    while True:
        place += 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error:
            raise UsageError(f"{path}: row {place} is no CSV: name {_WHAT}") from None
        if place > 1 and any(cell.strip() for cell in row):
            is_cut_off = lines.is_cut_off and len(row) < len(header)
            yield f"row {place}", partial(_of_row, row, header, decimal, is_cut_off)


def _without_empty_end(row: list[str]) -> list[str]:
    filled = [place for place, cell in enumerate(row, start=1) if cell.strip()]
    return row[: max(filled, default=0)]


def _of_row(row: list[str], header: list[str], decimal: str, is_cut_off: bool) -> ExternalResult:
    if is_cut_off:
        raise BadResult("the file is cut off within it: copy it again")
    row = _without_empty_end(row)
    if len(row) > len(header):
        raise BadResult(f"it has {len(row)} cells, the header has {len(header)}")
    fields = {name: cell.strip() for name, cell in zip(header, row, strict=False) if cell.strip()}
    if decimal != ".":
        fields |= {name: fields[name].replace(decimal, ".") for name in _NUMBERS if name in fields}
    return _of_fields(fields, "csv")


def _of_fields(fields: Mapping[str, str], tool: str) -> ExternalResult:
    if "benchmark" not in fields or "value" not in fields:
        raise BadResult("it has no benchmark, or no value")
    metric, unit = fields.get("metric", "time"), fields.get("unit", "us")
    convert: Callable[[object, str], float] = number
    if metric == "time":
        if fields.get("direction", "lower") != "lower":
            raise BadResult("less time is better: its direction is lower")
        if fields.get("scale", RATIO) != RATIO:
            raise BadResult("a time is a ratio: name another metric to compare its differences")
        convert, unit = partial(_time, unit), "us"
    else:
        if "unit" not in fields:
            raise BadResult(f"the unit of {metric} is missing: add a column unit")
        if "direction" not in fields:
            raise BadResult(f"{metric} needs a column direction: lower or higher is better")
        if "scale" in fields:
            try:
                unit = with_scale(unit, fields["scale"])
            except ValueError as error:
                raise BadResult(str(error)) from None
    low = convert(fields["low"], "low") if "low" in fields else None
    high = convert(fields["high"], "high") if "high" in fields else None
    created_at = iso_time(fields.get("time"))
    if "time" in fields and created_at is None:
        raise BadResult("its time is not written as 2026-01-31T02:00:00+00:00")
    commit = None
    if "commit" in fields:
        commit = _commit(fields["commit"], fields.get("branch", ""))
    cache = fields.get("cache", "")
    if cache not in ("", "cold", "hot"):
        raise BadResult("its cache is neither cold nor hot")
    return ExternalResult(
        name=fields["benchmark"],
        variant=fields.get("variant", ""),
        median=convert(fields["value"], "value"),
        low=low,
        high=high,
        n_samples=count(fields.get("samples", 0), "samples"),
        metric=metric,
        unit=unit,
        direction=fields.get("direction", "lower"),
        cache=cache,
        shape=(_size(fields, "m"), _size(fields, "n"), _size(fields, "k")),
        device=fields.get("device", fields.get("gpu", "")),
        environment={"tool": tool},
        commit=commit,
        created_at=created_at,
        occasion=fields.get("occasion", ""),
    )


def _time(unit: str, value: object, name: str) -> float:
    return in_us(value, unit, name)


@lru_cache(maxsize=1024)
def _commit(sha: str, branch: str) -> CommitInfo:
    return commit_of(sha, branch=branch)


def _size(fields: Mapping[str, str], name: str) -> int:
    return count(fields[name], name) if name in fields else 1


def check_text(path: str) -> None:
    """Raise UsageError if a file can't be read to its end, or is too large."""
    deque(_Lines(path), maxlen=0)
