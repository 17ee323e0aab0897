"""Table rows of kernels and changed cases, with links to the underlying results."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo
from typing import Any

from flexq_bench.dashboard.shared.formatting import (
    as_interval,
    local_time,
    percent_change,
    short_commit,
)
from flexq_bench.dashboard.shared.links import history_address, page_address
from flexq_bench.dashboard.views.home.sparkline import sparkline
from flexq_bench.db.queries import AlertRow
from flexq_bench.results.scoreboard import BoardRow, CaseChange, Change
from flexq_bench.stats import Interval
from flexq_bench.verdicts import Verdict
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.operation import describe

_MARKS = {
    Verdict.SLOWER: "slower ▲",
    Verdict.FASTER: "faster ▼",
    Verdict.SAME: "same",
    Verdict.AMBIGUOUS: "unclear",
}


def score_rows(
    rows: Sequence[BoardRow], alerts: Sequence[AlertRow], zone: tzinfo
) -> list[dict[str, Any]]:
    """Return one row per kernel and GPU. alerts: the open ones, newest first."""
    by_kernel: dict[tuple[str, str], AlertRow] = {}
    for alert in reversed(alerts):
        for gpu in alert.gpus:
            by_kernel.update({(gpu, kernel): alert for kernel in alert.kernels})
    return [_score(row, by_kernel.get((row.gpu, row.label)), zone) for row in rows]


def change_rows(changes: Sequence[CaseChange]) -> list[dict[str, Any]]:
    """Return one row per case."""
    return [
        {
            "kernel": kernel_label(case.series.kernel, case.series.variant),
            "shape": describe(case.series.operation, case.series.parameters),
            "GPU": case.series.gpu,
            "change": percent_change(case.change.ratio),
            "95 % interval": as_interval(case.change.ratio),
            "µs": case.latest.median_us,
            "stage": case.series.stage,
            "cache": case.series.cache,
            "history": _history(case),
            "samples": page_address("measurement", uuid=case.latest.measurement),
            "commits": _commits(case.change.then, case.latest.commit),
        }
        for case in changes
    ]


def _score(row: BoardRow, alert: AlertRow | None, zone: tzinfo) -> dict[str, Any]:
    kernel, _, variant = row.label.partition("[")
    kernel_filters = {"kernel": kernel, "gpu": row.gpu}
    if variant:
        kernel_filters["variant"] = variant.removesuffix("]")
    return {
        "kernel": row.label,
        "GPU": row.gpu,
        "last week": percent_change(_ratio(row.week)),
        "95 % interval": as_interval(_ratio(row.week)),
        "verdict": "nothing to compare" if row.week is None else _MARKS[row.week.verdict],
        "trend": sparkline([point.ratio for point in row.trend], row.half_width),
        "release": percent_change(_ratio(row.release)),
        "95 % interval, release": as_interval(_ratio(row.release)),
        "cases": len(row.series),
        "compared": 0 if row.week is None else row.week.cases,
        "alert": None if alert is None else page_address("alert", alert=str(alert.id)),
        "history": page_address("history", **kernel_filters),
        "run": page_address("results", run=row.run[:8]),
        "commits": None if row.week is None else _commits(row.week.then, row.commit),
        "commit": short_commit(row.commit, dirty=False),
        "measured": local_time(row.at, zone),
    }


def _ratio(change: Change | None) -> Interval | None:
    return None if change is None else change.ratio


def _commits(base: str, head: str) -> str | None:
    """Return a link to Compare for two commits; None: they are the same."""
    if base == head:
        return None
    sides = {"base-commits": base[:10], "head-commits": head[:10]}
    return page_address("compare", kind="commits", **sides)


def _history(case: CaseChange) -> str:
    series = case.series
    variant = {"variant": series.variant} if series.variant else {}
    return history_address(series, **variant, cache=series.cache)
