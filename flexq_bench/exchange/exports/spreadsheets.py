"""Tables of results for spreadsheets: CSV (RFC 4180, UTF-8) and XLSX (Office Open XML).

A row for each comparable result. Parameters of operations have columns of their own, which are
empty in rows of other operations. Texts that would be formulas begin with an apostrophe.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

from flexq_bench.db.records import Record
from flexq_bench.exchange.exports.cells import as_cell
from flexq_bench.exchange.exports.selection import comparable
from flexq_bench.packages import require_extra
from flexq_bench.workloads.operation import parse_values

_Cell = str | int | float | bool | None
_BEFORE = (
    *("project", "kernel", "variant", "backend", "operation", "stage", "cache", "regime", "metric"),
    *("gpu", "model", "layer"),
)
_AFTER = (
    *("value", "ci_low", "ci_high", "unit", "direction", "n_samples", "floor_us", "pct_of_floor"),
    *("tops", "max_rel_error", "exact", "weight_bits", "act_bits", "group", "commit", "subject"),
    *("created_at", "run", "suite", "uuid"),
)
_MAX_ROWS = 1_048_576  # of a sheet, with the names of columns


def write_csv(records: Iterable[Record]) -> tuple[str, int]:
    """Format every comparable record; returns the text and the number of records."""
    text = io.StringIO()
    rows = list(_rows(records))
    writer = csv.writer(text)
    writer.writerows(rows)
    return text.getvalue(), len(rows) - 1


def write_xlsx(records: Iterable[Record]) -> tuple[bytes, int]:
    """Format the same as a workbook with a sheet for each million results.

    Raises MissingPackageError without openpyxl.
    """
    require_extra("spreadsheets", "db export --format xlsx")

    from openpyxl import Workbook
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    workbook = Workbook(write_only=True)
    names, *rows = _rows(records)
    for start in range(0, len(rows) or 1, _MAX_ROWS - 1):
        sheet = workbook.create_sheet("results")
        sheet.append(names)
        for row in rows[start : start + _MAX_ROWS - 1]:
            sheet.append(
                [ILLEGAL_CHARACTERS_RE.sub("", c) if isinstance(c, str) else c for c in row]
            )
    content = io.BytesIO()
    workbook.save(content)
    return content.getvalue(), len(rows)


def _rows(records: Iterable[Record]) -> Iterator[list[_Cell]]:
    """Yield the names of the columns, then a row for each record."""
    selected = list(comparable(records))
    parameters = [dict(parse_values(record.parameters)) for record in selected]
    names = sorted({name for values in parameters for name in values} - {*_BEFORE, *_AFTER})
    yield [*_BEFORE, *map(as_cell, names), *_AFTER]
    for record, values in zip(selected, parameters, strict=True):
        fields = _fields(record)
        before, after = ([fields[name] for name in part] for part in (_BEFORE, _AFTER))
        row = [*before, *(values.get(name) for name in names), *after]
        yield [as_cell(cell) if isinstance(cell, str) else cell for cell in row]


def _fields(record: Record) -> dict[str, _Cell]:
    same = ("floor_us", "pct_of_floor", "tops", "max_rel_error", "exact", "n_samples", "group")
    return {
        **{name: getattr(record, name) for name in (*_BEFORE, *same)},
        "value": record.median_us,
        "ci_low": record.ci_low_us,
        "ci_high": record.ci_high_us,
        "unit": record.unit,
        "direction": record.direction,
        "weight_bits": record.weight_bits or None,
        "act_bits": record.act_bits or None,
        "commit": record.commit.sha,
        "subject": record.commit.subject,
        "created_at": record.created_at,
        "run": record.run.uuid,
        "suite": record.run.suite,
        "uuid": record.uuid,
    }
