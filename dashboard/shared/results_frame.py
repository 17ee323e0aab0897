"""Results as a table: one row a result, with what it is worth beside the baseline and the floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from dashboard.shared.spreadsheet import to_csv
from db.queries import ResultRow
from flexq_bench.stats import Interval
from flexq_bench.stats.baseline import Row, compare_with_baseline, half_width_percent
from workloads.case import kernel_label
from workloads.probes import is_probe

# Units as in db.records.Record; _low and _high are ends of 95 % intervals. `label` names a kernel
# with its variant, `is_timed` says that the time is of a right result and may be compared.
COLUMNS = {
    "label": "str",
    "kernel": "str",
    "variant": "str",
    "model": "str",
    "layer": "str",
    "m": "int64",
    "n": "int64",
    "k": "int64",
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
_OURS_ALONE = ["is_probe", "is_timed"]


def results_frame(results: Sequence[ResultRow], baseline: str) -> pd.DataFrame:
    """Every result with its ratios; runs in the order given, each by shape, stage, cache and M.

    results: whole runs, those of one run together: a baseline that a viewer filters away still
    counts. baseline: a kernel's label.
    """
    together = [list(of) for _, of in groupby(results, _run)]
    rows = [
        _cells(row, baseline)
        for group in together
        for row in compare_with_baseline(group, baseline)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)


def as_csv(frame: pd.DataFrame) -> str:
    """The frame for a spreadsheet: names with units, full precision, times in ISO 8601, UTC."""
    table = frame.drop(columns=_OURS_ALONE)
    table["created_at"] = [moment.isoformat() for moment in table["created_at"]]
    return to_csv(table)


def narrowed(frame: pd.DataFrame, wanted: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """The rows that have one of the wanted values in each column; no values: any will do."""
    for column, values in wanted.items():
        if values:
            frame = frame[frame[column].isin(list(values))]
    return frame


def interval_cells(name: str, interval: Interval | None) -> dict[str, float | None]:
    """The columns `name`, `name_low` and `name_high` of a row; None: there is no interval."""
    ends = (None,) * 3 if interval is None else (interval.estimate, interval.low, interval.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def _run(result: ResultRow) -> str:
    return result.run


def _cells(row: Row[ResultRow], baseline: str) -> dict[str, Any]:
    return result_cells(row.result, row.pct_of_floor, row.speedup, baseline)


def result_cells(
    r: ResultRow, pct_of_floor: Interval | None, speedup: Interval | None, baseline: str
) -> dict[str, Any]:
    """The columns of one result; ratios as they were computed of it."""
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
