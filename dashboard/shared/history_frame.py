"""Histories of series as a DataFrame: one row per result, with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flexq_bench.db.queries import EXTERNAL_BACKEND, HistoryPoint, SeriesName
from flexq_bench.stats import Interval, ratio_interval
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.operation import describe

# name: for display. series: id. label: kernel with its variant. place: index of the commit among
# those of all series, oldest first. value, low, high: in one unit.
COLUMNS = {
    "name": "str",
    "label": "str",
    "series": "int64",
    "place": "int64",
    "commit": "str",
    "epoch": "int64",
    "run": "str",
    "measurement": "str",
    "created_at": "datetime64[us, UTC]",
    "subject": "str",
    "device": "int64",
    "value": "float64",
    "low": "float64",
    "high": "float64",
}


def history_frame(
    histories: Mapping[SeriesName, Sequence[HistoryPoint]],
    *,
    of_floor: bool = False,
    relative_to: int | None = None,
) -> pd.DataFrame:
    """Return all points of these series, grouped by series, oldest commit first.

    of_floor: 100 · floor / time instead of the time; points without a floor are left out.
    relative_to: a topo_order; 100 · time / time of the series at this commit, or at the last
    measured commit before it; series without one are left out.
    """
    places = _places([point for points in histories.values() for point in points])
    rows = []
    for series, points in histories.items():
        reference = None if relative_to is None else _level_at(points, relative_to)
        for point in points:
            value: Interval | None
            if of_floor:
                value = _of_floor(point)
            elif relative_to is not None:
                value = reference and _percent(ratio_interval(_median(point), reference))
            else:
                value = _median(point)
            if value is not None:
                rows.append(_cells(series, point, value, places[point.commit]))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)


def series_name(series: SeriesName) -> str:
    """Return `flexq-w6a6 M=8 N=4096 K=4096 gemm cold, NVIDIA H200 (kernel 1, protocol 2)`."""
    label = kernel_label(series.kernel, series.variant)
    if (
        series.backend == EXTERNAL_BACKEND
    ):  # of another tool, whose case parameters are in the variant
        cache = f" {series.cache}" if series.cache else ""
        shape = describe(series.operation, series.parameters)
        shape = f" {shape}" if shape else ""
        metric = "" if series.metric == "time" else f", {series.metric}"
        unit = f"{metric} in {series.unit}, {series.direction} is better" if metric else ""
        return f"{series.project}: {label}{shape}{cache}{unit}, {series.gpu} (by history alone)"
    shape = describe(series.operation, series.parameters)
    version = f"kernel {series.kernel_version}, protocol {series.protocol_version}"
    return f"{label} {shape} {series.stage} {series.cache}, {series.gpu} ({version})"


def _places(points: Sequence[HistoryPoint]) -> dict[str, int]:
    """Number the commits by ancestry; those of different projects at one place by time."""
    ordered = sorted(points, key=lambda point: (point.topo_order or 0, point.created_at))
    return {sha: place for place, sha in enumerate(dict.fromkeys(p.commit for p in ordered))}


def _median(point: HistoryPoint) -> Interval:
    median, low, high = point.median_us, point.ci_low_us, point.ci_high_us
    return Interval(median, median if low is None else low, median if high is None else high)


def _of_floor(point: HistoryPoint) -> Interval | None:
    if not point.floor_us or not point.median_us:
        return None
    floor = Interval(point.floor_us, point.floor_us, point.floor_us)
    return _percent(ratio_interval(floor, _median(point)))


def _level_at(points: Sequence[HistoryPoint], place: int) -> Interval | None:
    """Return the newest result of the last commit up to this topo_order; None: there is none."""
    before = [p for p in points if p.topo_order is not None and p.topo_order <= place]
    return _median(before[-1]) if before and before[-1].median_us else None


def _percent(ratio: Interval) -> Interval:
    return Interval(100 * ratio.estimate, 100 * ratio.low, 100 * ratio.high)


def _cells(series: SeriesName, point: HistoryPoint, value: Interval, place: int) -> dict[str, Any]:
    return {
        "name": series_name(series),
        "label": kernel_label(series.kernel, series.variant),
        "series": series.id,
        "place": place,
        "commit": point.commit,
        "epoch": point.epoch,
        "run": point.run,
        "measurement": point.measurement,
        "created_at": point.created_at,
        "subject": point.subject,
        "device": point.device,
        "value": value.estimate,
        "low": value.low,
        "high": value.high,
    }
