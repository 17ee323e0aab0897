"""Bencher Metric Format: benchmarks by name, each with its measures.

Specification: https://bencher.dev/docs/reference/bencher-metric-format, schema:
https://bencher.dev/bmf.json. Times are the measure `latency`, in nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from flexq_bench.db.records import Record
from flexq_bench.exchange.exports.selection import (
    label_of,
    newest_of_each_series,
    place_of,
    shortened,
)

_MAX_NAME_LENGTH = 1024  # maximum characters of a benchmark's name
_MAX_MEASURE_LENGTH = 64
_NS = 1e3  # nanoseconds in a microsecond


def write(records: Iterable[Record]) -> tuple[str, int]:
    """Format the newest comparable result of each series; returns the text and its metric count."""
    benchmarks: dict[str, dict[str, Any]] = {}
    for record in newest_of_each_series(records):
        case = f"{label_of(record)} {place_of(record)}".rstrip()
        name = shortened(f"{case} on {record.gpu}", _MAX_NAME_LENGTH)
        measures = benchmarks.setdefault(name, {})
        measure = _measure(record)
        if measure in measures:  # another series with the same name
            tail = f"{record.input_distribution} {record.protocol_version} {record.kernel_version}"
            name = shortened(f"{name} ({tail.strip()})", _MAX_NAME_LENGTH)
            measures = benchmarks.setdefault(name, {})
        measures[measure] = _metric(record)
    count = sum(map(len, benchmarks.values()))
    return json.dumps(benchmarks, indent=1, ensure_ascii=False) + "\n", count


def _measure(record: Record) -> str:
    if record.unit != "us":
        return shortened(f"{record.metric}-{record.unit}".replace("_", "-"), _MAX_MEASURE_LENGTH)
    return "latency" if record.metric == "time" else f"{record.metric.replace('_', '-')}-ns"


def _metric(record: Record) -> dict[str, float]:
    factor = _NS if record.unit == "us" else 1.0
    values = {
        "value": record.median_us,
        "lower_value": record.ci_low_us,
        "upper_value": record.ci_high_us,
    }
    return {name: value * factor for name, value in values.items() if value is not None}
