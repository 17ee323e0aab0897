"""Locust: the file `PREFIX_stats.csv` of `--csv PREFIX`. Times are in milliseconds.

A row (docs.locust.io, "Retrieve test statistics in CSV format") is of one request, the last one of
all of them; percentiles are columns named `50%` to `100%`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    MAX_BYTES,
    ExternalResult,
    Reading,
    beside,
    by_unit,
    collect_each,
    count,
)
from flexq_bench.runs.text_files import read_text

_WHAT = "the file PREFIX_stats.csv of locust --csv PREFIX"
HEADER = "Type,Name,Request Count,Failure Count,Median Response Time"
_ALL = "Aggregated"
_RATES = {"Requests/s": ("throughput", "requests/s", True)}
_TIMES = {
    "Median Response Time": "time", "Average Response Time": "mean", "95%": "p95", "99%": "p99",
}  # fmt: skip


def read(path: str) -> Reading:
    """Read median, mean, 95th and 99th percentile of times, requests per second, failures.

    Raises UsageError if the file is of another format.
    """
    text = read_text(path, _WHAT, most_bytes=MAX_BYTES)
    if not text.replace('"', "").startswith(HEADER):
        raise UsageError(f"{path} has other columns: name {_WHAT}")
    rows = csv.DictReader(io.StringIO(text, newline=None))
    return collect_each(rows, _results, "row", key="Name")


def _results(row: Mapping[str, str]) -> list[ExternalResult]:
    n = count(row["Request Count"], "Request Count")
    failures = count(row["Failure Count"], "Failure Count")
    values = [
        (metric, fields)
        for column, metric in _TIMES.items()
        if row.get(column) not in (None, "", "N/A")
        for fields in beside(metric, row[column], "ms")  # 0: no request was answered
    ]
    for column, (metric, unit, higher) in _RATES.items():
        if float(row[column]) > 0:
            values.append((metric, by_unit(row[column], unit, metric=metric, higher=higher)))
    share = failures / n if n else 0.0
    values.append(("failures", by_unit(share, "fraction", metric="failures", higher=False)))
    return [
        ExternalResult(
            name=row["Name"] or _ALL,
            variant=row["Type"],
            **fields,
            n_samples=n,
            environment={"tool": "locust"},
        )
        for _, fields in values
    ]
