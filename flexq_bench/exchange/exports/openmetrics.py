"""OpenMetrics text, version 1.0: gauges of the newest results.

Specification: https://prometheus.io/docs/specs/om/open_metrics_spec/. It requires base units, so
times are in seconds; values of other metrics are gauges with metric and unit as labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from flexq_bench.db.records import LINEAR, Record
from flexq_bench.exchange.exports.selection import newest_of_each_series
from flexq_bench.workloads.operation import parse_values

_S = 1e-6  # seconds in a microsecond
_RESERVED = (
    *("project", "kernel", "kernel_version", "variant", "backend", "stage", "cache", "metric"),
    *("operation", "bits", "group", "inputs", "protocol", "gpu", "commit", "unit"),
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
        "bits": f"w{record.weight_bits}a{record.act_bits}" if record.weight_bits else "",
        "group": "" if record.group is None else record.group,
        "inputs": record.input_distribution,
        "protocol": record.protocol_version,
        "gpu": record.gpu,
        "commit": record.commit.sha,
        **more,
    }
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
    return f"{datetime.fromisoformat(record.created_at).timestamp():.3f}"
