"""Results as a DataFrame: one row per result, with its ratios to the baseline and the floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import pandas as pd

from flexq_bench.dashboard.shared.spreadsheet import to_csv
from flexq_bench.db.queries import ResultRow
from flexq_bench.stats import Interval
from flexq_bench.stats.baseline import compare_with_baseline, half_width_percent
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.probes import is_probe

# m, n, k: missing for operations other than linear. Units as in db.records.Record; _low and _high
# are ends of 95 % intervals. label: kernel with variant. is_timed: the result is correct and has a
# time.
COLUMNS = {
    "label": "str",
    "kernel": "str",
    "variant": "str",
    "model": "str",
    "layer": "str",
    "operation": "str",
    "parameters": "str",
    "m": "Int64",
    "n": "Int64",
    "k": "Int64",
    "weight_bits": "int64",
    "stage": "str",
    "cache": "str",
    "regime": "str",
    "median_us": "float64",
    "ci_low_us": "float64",
    "ci_high_us": "float64",
    "half_width_pct": "float64",
    "floor_us": "float64",
    "pct_of_floor": "float64",
    "pct_of_floor_low": "float64",
    "pct_of_floor_high": "float64",
    "tops": "float64",
    "speedup": "float64",
    "speedup_low": "float64",
    "speedup_high": "float64",
    "baseline": "str",
    "status": "str",
    "correct": "str",
    "detail": "str",
    "commit": "str",
    "dirty": "bool",
    "gpu": "str",
    "backend": "str",
    "suite": "str",
    "run": "str",
    "created_at": "datetime64[us, UTC]",
    "is_probe": "bool",
    "is_timed": "bool",
}
_INTERNAL_COLUMNS = ["is_probe", "is_timed"]


def results_frame(results: Sequence[ResultRow], baseline: str) -> pd.DataFrame:
    """Return results with their ratios; runs in the given order, each by shape, stage, cache and M.

    results: complete runs, grouped by run, so that the baseline is present even if filters hide it.
    baseline: a kernel's label.
    """
    by_run = [list(group) for _, group in groupby(results, attrgetter("run"))]
    rows = [
        result_cells(row.result, row.pct_of_floor, row.speedup, baseline)
        for group in by_run
        for row in compare_with_baseline(group, baseline)
    ]
    return typed(pd.DataFrame(rows, columns=list(COLUMNS)), COLUMNS)


def typed(frame: pd.DataFrame, types: Mapping[str, str]) -> pd.DataFrame:
    """Return a frame with columns of these types; sizes are plain integers if all are known."""
    sizes = [name for name in "mnk" if frame[name].notna().all()]
    return frame.astype({**types, **dict.fromkeys(sizes, "int64")})


def as_csv(frame: pd.DataFrame) -> str:
    """Return a frame as CSV: names with units, full precision, times in ISO 8601, UTC."""
    table = frame.drop(columns=_INTERNAL_COLUMNS)
    table["created_at"] = [moment.isoformat() for moment in table["created_at"]]
    return to_csv(table)


def narrowed(frame: pd.DataFrame, accepted: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Return the rows with one of the accepted values in each column; no values: all."""
    for column, values in accepted.items():
        if values:
            frame = frame[frame[column].isin(list(values))]
    return frame


def interval_cells(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Return the columns `name`, `name_low` and `name_high` of a row; None: no interval."""
    ends = (None,) * 3 if interval is None else (interval.estimate, interval.low, interval.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def result_cells(
    r: ResultRow, pct_of_floor: Interval | None, speedup: Interval | None, baseline: str
) -> dict[str, Any]:
    """Return the columns of one result and its ratios."""
    probe = is_probe(r.kernel)
    return {
        **{name: getattr(r, name) for name in COLUMNS if hasattr(r, name)},
        **interval_cells("pct_of_floor", pct_of_floor),
        **interval_cells("speedup", speedup),
        "label": kernel_label(r.kernel, r.variant),
        "half_width_pct": half_width_percent(r),
        "baseline": baseline,
        "correct": _correct(r),
        "regime": r.regime or "",
        "is_probe": probe,
        "is_timed": r.status in ("ok", "noisy") and r.median_us is not None and not probe,
    }


def _correct(result: ResultRow) -> str:
    if result.status == "incorrect":
        return "NO"
    if result.status not in ("ok", "noisy"):
        return ""
    return "exact" if result.exact else "yes"
