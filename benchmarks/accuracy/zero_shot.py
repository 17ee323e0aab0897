"""Zero-shot table of docs: stored results of tasks, by scheme and for the unquantized model.

    python benchmarks/accuracy/zero_shot.py RECORDS.jsonl.gz [...]

RECORDS are written by `flexq-bench db export`, from results of `flexq-bench accuracy --tasks …`. A
cell is the metric in percent and its difference to the unquantized model in points, with a 95 %
interval over the same questions; the last row is the mean of acc over tasks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from flexq_bench.accuracy.results import FULL_PRECISION, MetricResult, difference
from flexq_bench.accuracy.tasks import ZERO_SHOT

_METRICS = ("acc", "acc_norm")


def main() -> None:
    """Print the table of the files named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, nargs="+")
    results = [finding for path in parser.parse_args().records for finding in read(path)]
    schemes = list(dict.fromkeys(finding.scheme for finding in results))
    by_key = {(f.task, f.metric, f.scheme): f for f in results}
    lines = [
        f"| task | metric | questions | {' | '.join(f'`{name}`' for name in schemes)} |",
        f"| --- | --- | ---: | {' | '.join('---' for _ in schemes)} |",
    ]
    for task in ZERO_SHOT:
        for metric in _METRICS:
            row = [by_key.get((task, metric, scheme)) for scheme in schemes]
            base = by_key.get((task, metric, FULL_PRECISION))
            if base is not None:
                cells = " | ".join(cell(base, result) for result in row)
                lines.append(f"| {task} | {metric} | {base.n_items:,} | {cells} |")
    lines.append(f"| mean | acc | | {' | '.join(mean_of(results, name) for name in schemes)} |")
    sys.stdout.write("\n".join(lines) + "\n")


def read(path: Path) -> list[MetricResult]:
    """The findings of a file of records, those of tasks only."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    records = [json.loads(line) for line in text.decode().splitlines()]
    names = ("scheme", "task", "task_version", "data_hash", "metric", "direction", "value")
    more = ("standard_error", "n_items", "parameters")
    return [
        MetricResult(
            values=tuple(record["values"]), **{name: record[name] for name in (*names, *more)}
        )
        for record in records
        if record.get("metric") in _METRICS and record["status"] == "ok"
    ]


def cell(base: MetricResult, result: MetricResult | None) -> str:
    """`63.2, -1.1 (-2.2 … +0.1)`."""
    if result is None or result.value is None:
        return ""
    shown = f"{100 * result.value:.1f}"
    change = None if result is base else difference(base, result)
    if change is None:
        return shown
    ends = f"{100 * change.interval.low:+.1f} … {100 * change.interval.high:+.1f}"
    unclear = "" if change.clear else ", within noise"
    return f"{shown}, {100 * change.interval.estimate:+.1f} ({ends}{unclear})"


def mean_of(results: Sequence[MetricResult], scheme: str) -> str:
    """The mean of acc over the tasks, where none is missing."""
    values = [f.value for f in results if (f.scheme, f.metric) == (scheme, "acc")]
    whole = len(values) == len(ZERO_SHOT)
    return f"{100 * mean(value or 0.0 for value in values):.1f}" if whole else ""


if __name__ == "__main__":
    main()
