"""Wandering levels: differences of adjacent means of a series without steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flexq_bench.stats.log_series import MAD_TO_SIGMA, Floats, effective_size
from flexq_bench.stats.segments import Segment

_WINDOWS = (8, 16, 32)  # values
_FEWEST_WINDOWS = 8  # adjacent windows of one length
_CLEAR_SIGMAS = 2.5  # limit above which a jump is not caused by wandering
# Relative standard error of a variance estimated by the MAD of overlapping windows, times the root
# of the number of disjoint windows: 1.4 to 1.6 in Gaussian noise.
_MAD_ERROR = 1.5


@dataclass(frozen=True, slots=True)
class Wander:
    """Observed variances [k] of the difference of two adjacent means of `sizes` [k] values.

    count: values of the series. errors: number of standard errors of such a variance that count as
    chance.
    """

    sizes: tuple[int, ...] = ()
    seen: tuple[float, ...] = ()
    count: int = 0
    errors: float = 0.0

    def variance(self, size: int, memory: float, sigma: float) -> float:
        """Variance of the difference of two levels of this many values, beyond that of their noise.

        memory: AR(1) coefficient of the noise; sigma: of one value. For levels shorter than the
        smallest size the result decreases linearly, as for a random walk.
        """
        if not self.sizes:
            return 0.0
        beyond = [
            self._beyond(one, seen, memory, sigma)
            for one, seen in zip(self.sizes, self.seen, strict=True)
        ]
        if size < self.sizes[0]:
            return beyond[0] * size / self.sizes[0]
        return float(np.interp(size, self.sizes, beyond))

    def _beyond(self, size: int, seen: float, memory: float, sigma: float) -> float:
        by_noise = 2 * sigma * sigma / float(effective_size(size, memory))
        error = _MAD_ERROR / float(np.sqrt(self.count / size))
        return seen - by_noise if seen > by_noise * (1 + self.errors * error) else 0.0


def find_wander(
    residuals: Floats, segments: Sequence[Segment], memory: float, sigma: float, *, errors: float
) -> tuple[Wander, list[Wander]]:
    """Wander of a fit of [k] segments, and for each of its k - 1 boundaries that of the others.

    residuals: [n] from the segments. memory: their AR(1) memory. sigma: of one of them. errors: as
    `Wander`'s. Noise with a slow component has little memory from one value to the next, and many
    segments follow it. Therefore all jumps except clear ones count as wandering, but not the one
    under test. The scale is robust over all positions, so levels must wander nearly everywhere.
    """
    effects = [
        right.at(right.start - 0.5) - left.at(right.start - 0.5)
        for left, right in pairwise(segments)
    ]
    starts = [one.start for one in segments[1:]]
    values = residuals.copy()
    for start, effect in zip(starts, effects, strict=True):
        if abs(effect) < _CLEAR_SIGMAS * sigma:
            values[start:] += effect
    every = _wander(values, errors)
    if not any(every.variance(size, memory, sigma) for size in every.sizes):
        return Wander(), [Wander()] * len(starts)
    without = []
    for start, effect in zip(starts, effects, strict=True):
        if abs(effect) < _CLEAR_SIGMAS * sigma:
            others = values.copy()
            others[start:] -= effect
            without.append(_wander(others, errors))
        else:
            without.append(every)
    return every, without


def _wander(values: Floats, errors: float) -> Wander:
    sums = np.concatenate(([0.0], np.cumsum(values)))
    sizes = [size for size in _WINDOWS if values.size >= _FEWEST_WINDOWS * size]
    seen = []
    for size in sizes:
        moved = (sums[2 * size :] - 2 * sums[size:-size] + sums[: -2 * size]) / size
        moved = moved - np.median(moved)
        seen.append((MAD_TO_SIGMA * float(np.median(np.abs(moved)))) ** 2)
    return Wander(tuple(sizes), tuple(seen), values.size, errors)
