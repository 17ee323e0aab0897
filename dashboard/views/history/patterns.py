"""Patterns of histories (step, drift, spike, …) as a table, one row per series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import pandas as pd

from flexq_bench.dashboard.shared.formatting import short_commit
from flexq_bench.dashboard.shared.history_frame import series_name
from flexq_bench.db.queries import HistoryPoint, SeriesName
from flexq_bench.stats.newest_step import FEWEST_POINTS
from flexq_bench.verdicts import Nights, Pattern, classify
from flexq_bench.verdicts.change_points import Scale
from flexq_bench.verdicts.commit_points import one_per_commit
from flexq_bench.verdicts.differences import as_positive

_WORDS = {
    Pattern.NEW_SERIES: "new: nothing to compare with",
    Pattern.NEW_EPOCH: "a new environment, too few results since",
    Pattern.CLOCK_DROP: "the GPU's clock changed, not the work",
    Pattern.SPIKE: "a spike: one or two results, and back",
    Pattern.STEP: "a step",
    Pattern.NEW_DEVICE: "another GPU: the level changed with it",
    Pattern.DRIFT: "a drift: a slow change without a step",
    Pattern.TOO_FEW: f"too few results: {FEWEST_POINTS} of one epoch are needed",
    Pattern.STEADY: "steady",
}
COLUMNS = ("series", "pattern", "since", "missing nightly runs")
MAX_RESULTS = 120  # results analysed; 1,000 with a step would take 0.5 s


def pattern_frame(histories: Mapping[SeriesName, Sequence[HistoryPoint]]) -> pd.DataFrame:
    """Return a row per series with results, in the given order: COLUMNS.

    The pattern is that of the newest results of the newest epoch (flexq_bench.verdicts.patterns).
    since: the commit at which it begins; empty: at the first of these results.
    """
    rows = [
        (
            series_name(series),
            *_pattern(
                tuple(one_per_commit(points)[-MAX_RESULTS:]), Scale.of(series.metric, series.unit)
            ),
        )
        for series, points in histories.items()
        if points
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


@lru_cache(maxsize=256)
def _pattern(points: tuple[HistoryPoint, ...], scale: Scale) -> tuple[str, str, int]:
    clocks = [point.sm_clock_mhz for point in points]
    values = [point.median_us for point in points]
    result = classify(
        Nights(
            values=values if scale is Scale.RATIO else as_positive(values),
            days=[point.created_at.toordinal() for point in points],
            epochs=[point.epoch for point in points],
            clocks_mhz=[float("nan") if clock is None else clock for clock in clocks],
            devices=[point.device for point in points],
        )
    )
    since = "" if result.index is None else short_commit(points[result.index].commit, dirty=False)
    missing = sum(last - first + 1 for first, last in result.missing)
    return _WORDS[result.pattern], since, missing
