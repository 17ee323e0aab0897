"""Reader of resources.csv, which benchmarks/kernels/resources.py writes."""

from __future__ import annotations

import csv
from pathlib import Path

from flexq_bench.kernels.runtime.resource_row import ResourceRow

_TEXT_COLUMNS = ("build", "target", "function")


def stored_resources() -> list[ResourceRow]:
    with (Path(__file__).parent / "resources.csv").open(newline="") as handle:
        rows = csv.reader(handle)
        columns = next(rows)
        return [ResourceRow(*map(_value, columns, row)) for row in rows]


def _value(column: str, cell: str) -> str | int | None:
    return cell if column in _TEXT_COLUMNS else int(cell) if cell else None
