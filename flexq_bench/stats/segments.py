"""Optimal partition of a series into segments, each of a constant level or of a straight line."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.ndimage import maximum_filter1d

from flexq_bench.stats.log_series import Floats, Ints
from flexq_bench.stats.step_likelihood import (
    best_place,
    costs_between_lines,
    innovation_variance,
    step_costs,
)

SHORTEST_SEGMENT = 3
SHORTEST_LINE = 20  # values: on fewer, a line and a step cannot be distinguished
_LENGTH_RATIO = 1.5  # ratio of consecutive window lengths; a finer grid gives no further candidates
_MOST_CANDIDATES = 1200
_REACH = 15  # values by which a boundary is moved at most
_BOUND_SIGMAS = 3.0  # limit beyond which a value is an outlier
_NEARBY = 60  # values on either side of a boundary from which the levels next to it are estimated
_CANDIDATE_SIGMAS = 1.2  # below the largest contrast expected by chance

Columns = tuple[Floats, Floats]


@dataclass(frozen=True, slots=True)
class Segment:
    """values[start:stop] follow level + slope · (i - start); residual: sum of squares."""

    start: int
    stop: int
    level: float
    slope: float
    residual: float

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def mean(self) -> float:
        return self.level + self.slope * (self.size - 1) / 2

    def at(self, index: float) -> float:
        return self.level + self.slope * (index - self.start)


class Sums:
    """Running sums of a series, from which any segment is fitted in constant time."""

    def __init__(self, values: Floats) -> None:
        self.size = values.size
        self.center = float(np.median(values)) if values.size else 0.0
        centered = values - self.center
        time = np.arange(values.size, dtype=np.float64)
        self._sum = np.concatenate(([0.0], np.cumsum(centered)))
        self._square = np.concatenate(([0.0], np.cumsum(centered * centered)))
        self._product = np.concatenate(([0.0], np.cumsum(centered * time)))

    def means(self, starts: Ints, stops: Ints) -> Floats:
        """[k] means of values[starts[i]:stops[i]], minus the center."""
        means: Floats = (self._sum[stops] - self._sum[starts]) / (stops - starts)
        return means

    def residuals(self, starts: Ints, stops: Ints) -> Columns:
        """Sums of squares [k] from the means, and from straight lines."""
        size = (stops - starts).astype(np.float64)
        total = self._sum[stops] - self._sum[starts]
        about_mean = self._square[stops] - self._square[starts] - total * total / size
        middle = (starts + stops - 1) / 2
        slanted = self._product[stops] - self._product[starts] - middle * total
        spread = np.maximum(size * (size * size - 1) / 12, 1e-12)
        about_line = about_mean - slanted * slanted / spread
        return np.maximum(about_mean, 0), np.maximum(about_line, 0)

    def fit(self, start: int, stop: int, line_penalty: float) -> Segment:
        """The better of a level and a line; a line must save more than its penalty."""
        size = stop - start
        total = float(self._sum[stop] - self._sum[start])
        residual = float(self._square[stop] - self._square[start]) - total * total / size
        level = self.center + total / size
        if size >= SHORTEST_LINE:
            middle = (start + stop - 1) / 2
            slanted = float(self._product[stop] - self._product[start]) - middle * total
            spread = size * (size * size - 1) / 12
            if slanted * slanted / spread > line_penalty:
                slope = slanted / spread
                return Segment(
                    start,
                    stop,
                    level - slope * (size - 1) / 2,
                    slope,
                    max(residual - slanted * slanted / spread, 0.0),
                )
        return Segment(start, stop, level, 0.0, max(residual, 0.0))


def candidates(sums: Sums, sigma: float) -> Ints:
    """Indices where a level may start: local maxima of contrasts of two adjacent windows.

    sigma: of one value. Window lengths grow geometrically, so the cost is of order n log n (a
    moving sum statistic at many bandwidths, Eichinger and Kirch 2018).
    """
    size = sums.size
    least = max(2.0, float(np.sqrt(2 * np.log(size))) - _CANDIDATE_SIGMAS)
    best = np.zeros(size + 1)
    length = SHORTEST_SEGMENT
    while 2 * length <= size:
        at = np.arange(length, size - length + 1)
        running = sums._sum
        contrast = np.abs(running[at + length] - 2 * running[at] + running[at - length])
        with np.errstate(divide="ignore", invalid="ignore"):  # sigma 0: infinite, or not a number
            contrast *= 1 / (sigma * np.sqrt(2 * length))
        peak = contrast >= maximum_filter1d(contrast, 2 * (length // 2) + 1, mode="nearest")
        peak &= contrast > least
        where = at[peak]
        best[where] = np.maximum(best[where], contrast[peak])
        length = max(length + 1, int(length * _LENGTH_RATIO))
    found = np.flatnonzero(best)
    if found.size > _MOST_CANDIDATES:
        strongest = np.argpartition(best[found], -_MOST_CANDIDATES)[-_MOST_CANDIDATES:]
        found = np.sort(found[strongest])
    # Near the ends windows are too short, so the partition tries all positions there.
    tail = np.arange(max(size - 6, SHORTEST_SEGMENT), size - SHORTEST_SEGMENT + 1)
    return np.union1d(found, tail).astype(np.int64)


def partition(sums: Sums, places: Ints, penalty: float, line_penalty: float) -> list[int]:
    """Boundaries, including 0 and n, of the least-cost segments; exact for these positions.

    A segment costs its residual sum of squares and `penalty`, a line `line_penalty` more (optimal
    partitioning, Jackson et al. 2005).
    """
    bounds = np.concatenate(([0], places, [sums.size])).astype(np.int64)
    count = bounds.size
    starts, stops = np.triu_indices(count, 1)
    about_mean, about_line = sums.residuals(bounds[starts], bounds[stops])
    length = bounds[stops] - bounds[starts]
    about_line = np.where(length >= SHORTEST_LINE, about_line + line_penalty, np.inf)
    cost = np.full((count, count), np.inf)
    cost[stops, starts] = np.where(
        length >= SHORTEST_SEGMENT, np.minimum(about_mean, about_line) + penalty, np.inf
    )
    best = np.zeros(count)
    before = np.zeros(count, dtype=np.int64)
    for stop in range(1, count):
        total = best[:stop] + cost[stop, :stop]
        before[stop] = total.argmin()
        best[stop] = total[before[stop]]
    found = [count - 1]
    while found[-1] > 0:
        found.append(int(before[found[-1]]))
    return [int(bounds[at]) for at in reversed(found)]


def settle(
    values: Floats,
    segments: list[Segment],
    memory: float,
    sigma: float,
    *,
    first: int = SHORTEST_SEGMENT,
) -> list[int]:
    """Boundaries of segments, each moved to its best position between its neighbours' middles.

    At each position two levels are estimated anew, from 60 values on either side; a line stays the
    same (`step_likelihood`). values: [n], not clipped, with AR(1) memory. sigma: of one value.
    first: the earliest position of a boundary.
    """
    moved = [0]
    for left, right in pairwise(segments):
        at = right.start
        low = max(first, moved[-1] + SHORTEST_SEGMENT, at - _REACH, (left.start + at) // 2)
        high = min(right.stop - SHORTEST_SEGMENT, at + _REACH, (at + right.stop + 1) // 2)
        if low < high:
            at = low + _place(values, left, right, np.arange(low, high + 1), memory, sigma)
        moved.append(at)
    return [*moved, segments[-1].stop]


def _place(
    values: Floats, left: Segment, right: Segment, places: Ints, memory: float, sigma: float
) -> int:
    """Best position of the boundary of two segments among neighbouring ones."""
    start = max(left.start, int(places[0]) - _NEARBY)
    stop = min(right.stop, int(places[-1]) + _NEARBY)
    time, part = np.arange(start, stop), values[start:stop]
    lines = [one.level + one.slope * (time - one.start) for one in (left, right)]
    beyond = _BOUND_SIGMAS * sigma
    if left.slope or right.slope:
        most = beyond * float(np.sqrt(1 - memory * memory))
        about = part - lines[0], part - lines[1]
        costs = costs_between_lines(*about, places - start, memory, most)
        return best_place(costs, np.zeros(costs.size), innovation_variance(costs, part.size, sigma))
    # An outlier counts like a value of the nearer level, and hardly moves the boundary.
    low, high = np.minimum(*lines), np.maximum(*lines)
    part = np.where(part < low - beyond, low, np.where(part > high + beyond, high, part)) - lines[0]
    costs, information = step_costs(part, places - start, memory)
    return best_place(costs, information, innovation_variance(costs, part.size, sigma))


def residuals_of(values: Floats, segments: list[Segment]) -> Floats:
    """[n] values minus their segments."""
    parts = []
    for one in segments:
        part = values[one.start : one.stop] - one.level
        if one.slope:
            part = part - one.slope * np.arange(one.size)
        parts.append(part)
    return np.concatenate(parts)
