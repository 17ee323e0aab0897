"""Steps of a whole series, decided again now that the values after each of them are known.

For readers of a finished history; alerts keep what was decided as its commits came.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from flexq_bench.stats.follower import (
    SELDOM,
    SETTLED,
    SIGNIFICANCE,
    Follower,
    History,
    Level,
    followed,
    outside,
)
from flexq_bench.stats.log_series import MAD_TO_SIGMA, Floats, autocorrelation, median
from flexq_bench.stats.newest_step import CLIP_SIGMAS, FEWEST_POINTS, NewestStep, newest_step
from flexq_bench.stats.step_likelihood import WITHIN

_CERTAIN = 6.0  # standard errors of a drift; with 4, levels of real series that wander have one
_COUNTED = 30.0  # independent values of a side: a level that wandered has had time to show it


def look_back(
    values: Floats,
    smallest: float,
    *,
    are_logs: bool = True,
    any_share: bool = False,
    noise: float = 0.0,
) -> History:
    """The steps of values [n] in hindsight, and the drift per value that levels of logs share.

    A level is searched once more for a step, and a step tested between its neighbours, until
    nothing changes. One look, in place of many, allows twice the share of series that switch.
    Arguments: as of `Follower`.
    """
    rules = {"are_logs": are_logs, "any_share": any_share, "noise": noise}
    drifts = {0.0, _drift_of_pieces(values)} if are_logs else {0.0}
    fits = [_fit(values, drift, smallest, **rules) for drift in sorted(drifts, key=abs)]
    best = min(fits, key=lambda fit: fit.cost)
    follower, starts = best.review.follower, best.starts
    reported = [level.start for level in follower.levels if level.is_reported]
    steps: list[tuple[int, float]] = []
    waiting: list[tuple[int, float]] = []
    for level in best.review.levels(starts):
        is_known = any(abs(level.start - start) <= WITHIN for start in reported)
        lasts = is_known or follower.lasts(level, values.size, 2 * SELDOM)
        (steps if lasts else waiting).append((level.start, level.p_value))
    return History(tuple(steps), tuple(waiting), tuple(follower.spells), best.drift)


@dataclass(frozen=True, slots=True)
class _Fit:
    """Levels that begin at `starts`, on a drift. cost: Bayesian information criterion."""

    drift: float
    starts: list[int]
    review: _Review
    cost: float


def _fit(values: Floats, drift: float, smallest: float, **rules: Any) -> _Fit:
    """Find levels on a drift, and correct the drift by them until it is right."""
    more = drift
    while True:
        rest = values - drift * np.arange(values.size)
        review = _Review(followed(rest, smallest, **rules))
        starts = review.starts()
        last, more = more, _drift_of_levels(rest, starts) if rules["are_logs"] else 0.0
        if more == 0 or 0 < abs(last) < 2 * abs(more):
            break
        drift += more
    squares = sum(float(about @ about) for about in _about_medians(rest, starts))
    free = 2 * len(starts) + (drift != 0)
    fit = values.size * float(np.log(max(squares, np.finfo(float).tiny)))
    return _Fit(drift, starts, review, fit + free * float(np.log(values.size)))


def _about_medians(values: Floats, starts: list[int]) -> list[Floats]:
    """Values [n] less the medians of their levels, by level, without outliers."""
    parts = [part - median(part) for part in np.split(values, starts)]
    limit = CLIP_SIGMAS * MAD_TO_SIGMA * float(median(np.abs(np.concatenate(parts))))
    return [np.clip(part, -limit, limit) for part in parts]


@dataclass(slots=True)
class _Review:
    """Tests between any two places of a series that was followed to its end."""

    follower: Follower
    tested: dict[tuple[int, int], tuple[int, NewestStep] | None] = field(default_factory=dict)

    def starts(self) -> list[int]:
        """First values of the levels, once nothing changes any more."""
        starts = [level.start for level in self.follower.levels if not level.settles]
        known: set[tuple[int, ...]] = set()
        while tuple(starts) not in known:
            known.add(tuple(starts))
            starts = self._with_more(starts)
            between = zip(*self._sides(starts), strict=True)
            starts = sorted({at for at, _ in filter(None, (self._step(*ends) for ends in between))})
        return starts

    def levels(self, starts: list[int]) -> Iterator[Level]:
        """The level that begins at each of `starts`."""
        for at, first, stop in zip(starts, *self._sides(starts), strict=True):
            found = self._step(first, stop)
            if found is not None:
                step = found[1]
                yield Level(at, step.before, step.effect, step.p_value, first, [], False)

    def _with_more(self, starts: list[int]) -> list[int]:
        """The starts, and those of steps within levels that are large enough beside them."""
        medians = [float(np.median(part)) for part in np.split(self.follower.values, starts)]
        least = self.follower.least_beside(medians)
        ends = [0, *starts, self.follower.values.size]
        found = filter(None, (self._step(*between) for between in pairwise(ends)))
        return sorted({*starts, *(at for at, step in found if abs(step.effect) >= least)})

    def _sides(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """For each start, where the level before it begins and its own ends."""
        return [0, *starts][: len(starts)], [*starts, self.follower.values.size][1:]

    def _step(self, first: int, stop: int) -> tuple[int, NewestStep] | None:
        """Index and test of the most likely step of the values [first, stop), if significant."""
        if (first, stop) not in self.tested:
            spells = [(start, end) for start, end, _ in self.follower.spells]
            index = outside(first, stop, spells)
            values = self.follower.values
            step = None
            if index.size >= FEWEST_POINTS:
                step = newest_step(values[index], values.size, _COUNTED, self.follower.noise)
            is_step = step is not None and step.p_value <= SIGNIFICANCE
            self.tested[first, stop] = (int(index[step.place]), step) if step and is_step else None
        return self.tested[first, stop]


def _drift_of_pieces(values: Floats) -> float:
    """Slope per value that most pieces of values [n] have; 0 if it is not certain."""
    size = min(SETTLED, values.size // FEWEST_POINTS)
    if size < FEWEST_POINTS:
        return 0.0
    pieces = values[: values.size // size * size].reshape(-1, size)
    time = np.arange(size) - (size - 1) / 2
    slopes = pieces @ time / float(time @ time)
    middle = float(median(slopes))
    scatter = MAD_TO_SIGMA * float(median(np.abs(slopes - middle)))
    return middle if abs(middle) > _CERTAIN * scatter / float(np.sqrt(slopes.size)) else 0.0


def _drift_of_levels(values: Floats, starts: list[int]) -> float:
    """Slope per value that the levels of values [n] share; 0 if it is not certain."""
    parts = _about_medians(values, starts)
    rest = np.concatenate(parts)
    time = np.concatenate([np.arange(part.size) - (part.size - 1) / 2 for part in parts])
    power = float(time @ time)
    slope = float(time @ rest) / power
    rest -= slope * time
    memory = autocorrelation(rest, levels=len(parts) + 1)
    freedom = max(values.size - len(parts) - 1, 1)
    variance = float(rest @ rest) / freedom * (1 + memory) / (1 - memory)
    return slope if abs(slope) > _CERTAIN * float(np.sqrt(variance / power)) else 0.0
