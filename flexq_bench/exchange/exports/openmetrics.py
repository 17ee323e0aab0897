"""OpenMetrics text, version 1.0: gauges of the newest results.

Specification: https://prometheus.io/docs/specs/om/open_metrics_spec/. It requires base units, so
times are in seconds; values of other metrics are gauges with metric and unit as labels.

A time series is a series: its commit is in `flexq_bench_commit_info`, which has the same label
`series`, so that a new commit continues the time series. Prometheus' text format reads it, too:
`promtool check metrics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from flexq_bench.db.identity import series_key
from flexq_bench.db.records import LINEAR, Record
from flexq_bench.db.writer import series_identity
from flexq_bench.exchange.exports.selection import bits_of, newest_of_each_series
from flexq_bench.workloads.operation import parse_values

_S = 1e-6  # seconds in a microsecond
_SERIES_DIGITS = 16  # of the hash of a series' identity
_RESERVED = (
    *("project", "kernel", "kernel_version", "variant", "backend", "stage", "cache", "metric"),
    *("operation", "bits", "group", "inputs", "protocol", "gpu", "commit", "unit", "series"),
)
_FAMILIES = (
    ("time_seconds", "seconds", "Time of a launch.", "median_us"),
    ("time_low_seconds", "seconds", "Lower end of its 95 % interval.", "ci_low_us"),
    ("time_high_seconds", "seconds", "Upper end of its 95 % interval.", "ci_high_us"),
    ("floor_seconds", "seconds", "Weight-read time of the same run.", "floor_us"),
)


def write(records: Iterable[Record]) -> tuple[str, int]:
    """Format the newest comparable result of each series; returns the text and its result count."""
    newest = newest_of_each_series(records)
    lines: list[str] = []
    for name, unit, help_text, field in _FAMILIES:
        samples = [
            f"flexq_bench_{name}{_labels(record)} {value * _S!r} {_seconds(record)}"
            for record in newest
            if record.unit == "us"
            for value in [getattr(record, field)]
            if value is not None
        ]
        lines += _family(f"flexq_bench_{name}", unit, help_text, samples)
    not_times = [record for record in newest if record.unit != "us"]
    samples = [
        f"flexq_bench_value{_labels(record, unit=record.unit)} {record.median_us!r} "
        f"{_seconds(record)}"
        for record in not_times
    ]
    lines += _family("flexq_bench_value", "", "Value of a metric other than time.", samples)
    samples = [
        f"flexq_bench_commit_info{_pairs(_commit_labels(record))} 1 {_seconds(record)}"
        for record in newest
    ]
    lines += _family("flexq_bench_commit_info", "", "Commit of the newest result.", samples)
    return "\n".join([*lines, "# EOF", ""]), len(newest)


def _family(name: str, unit: str, help_text: str, samples: list[str]) -> list[str]:
    if not samples:
        return []
    units = [f"# UNIT {name} {unit}"] if unit else []
    return [f"# TYPE {name} gauge", *units, f"# HELP {name} {help_text}", *samples]


def _labels(record: Record, **more: str) -> str:
    labels: Mapping[str, object] = {
        "project": record.project,
        "kernel": record.kernel,
        "kernel_version": record.kernel_version,
        "variant": record.variant,
        "backend": record.backend,
        "stage": record.stage,
        "cache": record.cache,
        "metric": record.metric,
        "operation": "" if record.operation == LINEAR else record.operation,
        **_parameters(record),
        "bits": bits_of(record),
        "group": "" if record.group is None else record.group,
        "inputs": record.input_distribution,
        "protocol": record.protocol_version,
        "gpu": record.gpu,
        "series": _series(record),
        **more,
    }
    return _pairs(labels)


def _commit_labels(record: Record) -> dict[str, str]:
    return {
        "series": _series(record),
        "project": record.project,
        "commit": record.commit.sha,
        "branch": record.commit.branch,
    }


def _series(record: Record) -> str:
    return series_key(series_identity(record))[:_SERIES_DIGITS]


def _pairs(labels: Mapping[str, object]) -> str:
    pairs = (f'{name}="{_escaped(str(value))}"' for name, value in labels.items() if value != "")
    return f"{{{','.join(pairs)}}}"


def _parameters(record: Record) -> dict[str, object]:
    """Return a label per parameter; a name that is a label already gets the prefix `p_`."""
    return {
        f"p_{name}" if name in _RESERVED else name: value
        for name, value in parse_values(record.parameters)
    }


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _seconds(record: Record) -> str:
    # Whole: the text format has integers here.
    return f"{datetime.fromisoformat(record.created_at).timestamp():.0f}"
