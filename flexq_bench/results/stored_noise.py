"""Run-to-run noise of stored series: of one, of a ratio within one run, of a mean over several.

Estimated from the newest results of each series and from its A/A calibration. A series with too few
results gets the pooled noise of all series; if that can't be estimated, ASSUMED is used, and
`source` reports it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby, pairwise

import numpy as np

from flexq_bench.db import queries
from flexq_bench.db.engine import Session
from flexq_bench.db.queries import HistoryPoint
from flexq_bench.stats import Interval
from flexq_bench.stats.run_noise import (
    RunNoise,
    larger_noise,
    noise_of_changes,
    run_noise,
    with_run_noise,
)

# Without data: 1 % per run, the smallest change that is ever reported.
ASSUMED = RunNoise(0.01, math.inf)
_ValueOf = Callable[[HistoryPoint], float | None]
OWN, OF_ALL, NOT_KNOWN = "its own runs", "other series and A/A runs", "not known, 1 % assumed"


class StoredNoise:
    """Noise of a set of series."""

    def __init__(
        self,
        histories: Mapping[int, Sequence[HistoryPoint]],
        calibration: Mapping[int, tuple[float, int]] | None = None,
    ) -> None:
        """histories: from `recent_histories`. calibration: from `noise_sigmas`.

        The noise is that of logarithms: of counts, values that are not above 0 are left out.
        """
        histories = {
            series: [point for point in points if point.median_us > 0]
            for series, points in histories.items()
        }
        self.histories = histories
        self._calibration = calibration or {}
        self._own: dict[int, RunNoise | None] = {}
        self._of_means: dict[tuple[int, ...], RunNoise] = {}

    def of_series(self, series_id: int) -> RunNoise:
        """Noise of ln(time) of one run."""
        own = self._own_noise(series_id)
        return own or larger_noise(self._of_all, self._calibrated(series_id)) or ASSUMED

    def source(self, series_id: int) -> str:
        """Describe the source of the estimate that `of_series` returns."""
        if self._own_noise(series_id) is not None:
            return OWN
        calibrated = self._calibrated(series_id) is not None
        return OF_ALL if self._of_all is not None or calibrated else NOT_KNOWN

    def time(self, series_id: int, measured: Interval, *, apart: bool = False) -> Interval:
        """The interval of a series' level, from the time and interval of one run; same unit.

        apart: the time is compared with one of another run. Only then, unknown noise is assumed to
        be ASSUMED; else it is left out.
        """
        is_estimated = self.source(series_id) != NOT_KNOWN
        return with_run_noise(
            measured, self.of_series(series_id) if is_estimated or apart else None
        )

    def of_floor_share(self, series_id: int) -> RunNoise | None:
        """Noise of ln(floor / time) within one run; None: too few runs have both."""
        points = self.histories.get(series_id, ())
        return noise_of_changes(np.array(_changes(points, _log_share)))

    def of_ratio(self, top: int, bottom: int) -> RunNoise | None:
        """Noise of ln(top / bottom) within one run; None: too few runs have both series."""
        below = {p.run: p.median_us for p in self.histories.get(bottom, ())}

        def log_ratio(point: HistoryPoint) -> float | None:
            other = below.get(point.run)
            return math.log(point.median_us / other) if other else None

        return noise_of_changes(np.array(_changes(self.histories.get(top, ()), log_ratio)))

    def of_mean(self, series_ids: Sequence[int]) -> RunNoise:
        """Noise of the mean of ln(time) over these series in one run, including correlated noise.

        Estimated from changes of the mean from run to run. If too few runs measured the series
        together, their noise is assumed to be fully correlated, so that a mean over more cases is
        not more precise. Kept, as viewers ask for the same means until something is stored.
        """
        key = tuple(series_ids)
        if key not in self._of_means:
            self._of_means[key] = self._estimate_of_mean(key)
        return self._of_means[key]

    def _estimate_of_mean(self, series_ids: tuple[int, ...]) -> RunNoise:
        changes_of_pair: dict[tuple[str, str], list[float]] = defaultdict(list)
        for series in series_ids:
            for part in _by_epoch(self.histories.get(series, ())):
                for before, after in pairwise(part):
                    change = math.log(after.median_us / before.median_us)
                    changes_of_pair[before.run, after.run].append(change)
        mean_changes = [
            np.mean(changes)
            for changes in changes_of_pair.values()
            if 2 * len(changes) >= len(series_ids)
        ]
        measured = noise_of_changes(np.array(mean_changes))
        if measured is not None:
            return measured
        each = [self.of_series(series) for series in series_ids]
        if not each:
            return ASSUMED
        return RunNoise(
            float(np.mean([noise.sigma for noise in each])), min(noise.degrees for noise in each)
        )

    @cached_property
    def _of_all(self) -> RunNoise | None:
        changes = [_changes(points, _log_time) for points in self.histories.values()]
        return noise_of_changes(np.array(list(chain.from_iterable(changes))))

    def _own_noise(self, series_id: int) -> RunNoise | None:
        """Noise of a series' own runs, estimated when it is asked for: a page shows few of many."""
        if series_id not in self._own:
            parts = _by_epoch(self.histories.get(series_id, ()))
            self._own[series_id] = run_noise([[p.median_us for p in part] for part in parts])
        own = self._own[series_id]
        return None if own is None else larger_noise(own, self._calibrated(series_id))

    def _calibrated(self, series_id: int) -> RunNoise | None:
        """Noise from A/A comparisons, whose variance is that of two sides."""
        sigma, comparisons = self._calibration.get(series_id, (0.0, 0))
        return RunNoise(sigma / math.sqrt(2), comparisons) if comparisons else None


def read_noise(session: Session, series_ids: Iterable[int]) -> StoredNoise:
    """Read the histories and calibration of these series, and estimate their noise."""
    ids = sorted(set(series_ids))
    return StoredNoise(queries.recent_histories(session, ids), queries.noise_sigmas(session, ids))


def _by_epoch(points: Sequence[HistoryPoint]) -> list[list[HistoryPoint]]:
    """Split results into epochs, in their order."""
    return [list(part) for _, part in groupby(points, key=lambda point: point.epoch)]


def _changes(points: Sequence[HistoryPoint], value_of: _ValueOf) -> list[float]:
    """Differences of value_of between consecutive runs of an epoch; runs with None are skipped."""
    changes = []
    for part in _by_epoch(points):
        values = [value for value in map(value_of, part) if value is not None]
        changes += [after - before for before, after in pairwise(values)]
    return changes


def _log_time(point: HistoryPoint) -> float:
    return math.log(point.median_us)


def _log_share(point: HistoryPoint) -> float | None:
    return math.log(point.floor_us / point.median_us) if point.floor_us else None
