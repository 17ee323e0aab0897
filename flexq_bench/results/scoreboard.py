"""Scoreboard: the latest run of each kernel and GPU, relative to a week before and a release."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from flexq_bench.db.queries import HistoryPoint, SeriesName
from flexq_bench.results.stored_comparison import verdict_of_ratio
from flexq_bench.results.stored_noise import StoredNoise
from flexq_bench.stats import Interval, geometric_mean, ratio_interval
from flexq_bench.stats.run_noise import with_run_noise
from flexq_bench.verdicts import Verdict
from flexq_bench.workloads.case import kernel_label

WEEK = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Change:
    """Ratio of the latest results of some cases to earlier ones: latest / then.

    ratio: geometric mean, with the 95 % interval of the ratio of levels. cases: number of cases;
    those without an earlier result of the same epoch are excluded. then: sha of the newest commit
    of the earlier results.
    """

    ratio: Interval
    cases: int
    then: str

    @property
    def verdict(self) -> Verdict:
        """The verdict as for two stored runs: a change if the whole interval lies beyond 1 %."""
        return verdict_of_ratio(self.ratio)


@dataclass(frozen=True, slots=True)
class TrendPoint:
    """A run: geometric mean of its times over those of the latest run, for the cases of both."""

    at: datetime
    commit: str
    ratio: float


@dataclass(frozen=True, slots=True)
class BoardRow:
    """A kernel on a GPU. series: of its latest run. half_width: 95 %, of ln of one run's mean."""

    label: str
    gpu: str
    run: str
    commit: str
    at: datetime
    series: tuple[int, ...]
    week: Change | None
    release: Change | None
    trend: tuple[TrendPoint, ...]
    half_width: float


@dataclass(frozen=True, slots=True)
class CaseChange:
    """One series: its latest result over that of a week before."""

    series: SeriesName
    change: Change
    latest: HistoryPoint


def board_rows(
    known: Iterable[SeriesName], noise: StoredNoise, *, release_order: int | None
) -> list[BoardRow]:
    """One row per kernel and GPU with results, sorted by GPU and label.

    known: series of one metric and project. noise: with their histories. release_order: position
    of the release in the ancestry; None: there is none. Results that are not newer than the release
    have no change since it. The latest run is the newest one of the kernel on the GPU; only its
    results are used.
    """
    by_row: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name in known:
        if noise.histories.get(name.id):
            by_row[name.gpu, kernel_label(name.kernel, name.variant)].append(name.id)
    rows = []
    for (gpu, label), series in sorted(by_row.items()):
        newest = max(
            (noise.histories[series_id][-1] for series_id in series),
            key=lambda point: point.created_at,
        )
        latest = {
            series_id: noise.histories[series_id][-1]
            for series_id in series
            if noise.histories[series_id][-1].run == newest.run
        }
        since = {
            series_id: point
            for series_id, point in latest.items()
            if release_order is not None
            and point.topo_order is not None
            and point.topo_order > release_order
        }
        rows.append(
            BoardRow(
                label,
                gpu,
                newest.run,
                newest.commit,
                newest.created_at,
                tuple(latest),
                change_of(latest, noise, _before(newest.created_at - WEEK)),
                None if release_order is None else change_of(since, noise, _up_to(release_order)),
                _trend(latest, noise.histories),
                noise.of_mean(tuple(latest)).half_width(1),
            )
        )
    return rows


def case_changes(
    known: Iterable[SeriesName], noise: StoredNoise, *, verdicts: Collection[Verdict] = ()
) -> list[CaseChange]:
    """Changes of each series from a week before its latest result, the largest first.

    verdicts: only those with one of these of slower and faster; empty: all.
    """
    changes = []
    for series in known:
        points = noise.histories.get(series.id)
        if not points:
            continue
        latest, is_then = points[-1], _before(points[-1].created_at - WEEK)
        # Noise only widens an interval: its estimate is left out where nothing can come of it.
        if verdicts:
            then = _earlier(latest, points, is_then)
            if then is None or verdict_of_ratio(_ratio(latest, then)) not in verdicts:
                continue
        change = change_of({series.id: latest}, noise, is_then)
        if change is not None and (not verdicts or change.verdict in verdicts):
            changes.append(CaseChange(series, change, latest))
    return sorted(changes, key=lambda change: -abs(math.log(change.change.ratio.estimate)))


def change_of(
    latest: Mapping[int, HistoryPoint],
    noise: StoredNoise,
    is_then: Callable[[HistoryPoint], bool],
) -> Change | None:
    """Return the change of several series since an earlier result; None: no series has one.

    For each series this is the newest earlier result of its latest epoch for which is_then is True.
    """
    ratios, series, then = [], [], []
    for series_id, now in latest.items():
        earlier = _earlier(now, noise.histories[series_id], is_then)
        if earlier is not None:
            ratios.append(_ratio(now, earlier))
            series.append(series_id)
            then.append(earlier)
    if not ratios:
        return None
    own = noise.of_series(series[0]) if len(series) == 1 else noise.of_mean(series)
    ratio = with_run_noise(geometric_mean(ratios), own, runs=2)
    return Change(ratio, len(ratios), max(then, key=lambda point: point.created_at).commit)


def _earlier(
    now: HistoryPoint, points: Sequence[HistoryPoint], is_then: Callable[[HistoryPoint], bool]
) -> HistoryPoint | None:
    """Return the last other point of now's epoch for which is_then is True; None: there is none."""
    return next(
        (
            p
            for p in reversed(points)
            if p.epoch == now.epoch and p.measurement != now.measurement and is_then(p)
        ),
        None,
    )


def _ratio(now: HistoryPoint, then: HistoryPoint) -> Interval:
    return ratio_interval(_interval(now), _interval(then))


def _trend(
    latest: Mapping[int, HistoryPoint], histories: Mapping[int, Sequence[HistoryPoint]]
) -> tuple[TrendPoint, ...]:
    """One point per run, oldest first, relative to the latest run; of each series' latest epoch."""
    logs: dict[str, list[float]] = defaultdict(list)
    first: dict[str, HistoryPoint] = {}
    for series_id, now in latest.items():
        for point in histories[series_id]:
            if point.epoch == now.epoch:
                logs[point.run].append(math.log(point.median_us / now.median_us))
                first.setdefault(point.run, point)
    ordered = sorted(first, key=lambda run: first[run].created_at)
    return tuple(
        TrendPoint(
            first[run].created_at,
            first[run].commit,
            math.exp(math.fsum(logs[run]) / len(logs[run])),
        )
        for run in ordered
    )


def _before(at: datetime) -> Callable[[HistoryPoint], bool]:
    return lambda point: point.created_at <= at


def _up_to(order: int) -> Callable[[HistoryPoint], bool]:
    return lambda point: point.topo_order is not None and point.topo_order <= order


def _interval(point: HistoryPoint) -> Interval:
    median, low, high = point.median_us, point.ci_low_us, point.ci_high_us
    return Interval(median, median if low is None else low, median if high is None else high)
