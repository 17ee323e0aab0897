"""Histories of series as one frame: a row a result, its value with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from db.queries import HistoryPoint, SeriesName
from flexq_bench.regress import Interval, ratio_interval
from workloads.case import kernel_label

# `name` is what people read, `series` tells series apart, `label` is the kernel with its variant.
# `place` counts the commits of all series together from 0, oldest first. value, low, high: in one
# unit.
COLUMNS = {
    "name": "str",
    "label": "str",
    "series": "int64",
    "place": "int64",
    "commit": "str",
    "epoch": "int64",
    "run": "str",
    "created_at": "datetime64[us, UTC]",
    "value": "float64",
    "low": "float64",
    "high": "float64",
}


def history_frame(
    histories: Mapping[SeriesName, Sequence[HistoryPoint]], *, of_floor: bool
) -> pd.DataFrame:
    """Every point of these series, series by series, oldest commit first.

    of_floor: 100 · floor / median in place of the median; points without a floor are left out.
    """
    places = _places([point for points in histories.values() for point in points])
    rows = []
    for series, points in histories.items():
        for point in points:
            value = _of_floor(point) if of_floor else _median(point)
            if value is not None:
                rows.append(_cells(series, point, value, places[point.commit]))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)


def series_name(series: SeriesName) -> str:
    """`flexq-w6a6 M=8 N=4096 K=4096 gemm cold, NVIDIA H200`, with what else sets it apart."""
    label = kernel_label(series.kernel, series.variant)
    shape = f"M={series.m} N={series.n} K={series.k}"
    version = f"kernel {series.kernel_version}, protocol {series.protocol_version}"
    return f"{label} {shape} {series.stage} {series.cache}, {series.gpu} ({version})"


def _places(points: Sequence[HistoryPoint]) -> dict[str, int]:
    """Commits by ancestry; those outside of a git tree come last, as first measured."""
    ordered = sorted(
        points,
        key=lambda point: (point.topo_order is None, point.topo_order or 0, point.created_at),
    )
    return {sha: place for place, sha in enumerate(dict.fromkeys(p.commit for p in ordered))}


def _median(point: HistoryPoint) -> Interval:
    median, low, high = point.median_us, point.ci_low_us, point.ci_high_us
    return Interval(median, median if low is None else low, median if high is None else high)


def _of_floor(point: HistoryPoint) -> Interval | None:
    if not point.floor_us or not point.median_us:
        return None
    floor = Interval(point.floor_us, point.floor_us, point.floor_us)
    ratio = ratio_interval(floor, _median(point))
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
        "created_at": point.created_at,
        "value": value.estimate,
        "low": value.low,
        "high": value.high,
    }
