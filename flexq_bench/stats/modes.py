"""Noise with modes: further levels at fixed distances, entered and left repeatedly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flexq_bench.stats.log_series import (
    Floats,
    Ints,
    resolution_scale,
    root_mean_square,
    run_bounds,
)
from flexq_bench.stats.sticky_levels import sticky_levels

FEWEST_HOPS = 5  # two are a change and its repair, which may happen twice
LONGEST_VISIT = 25  # values, of the median visit: longer visits are levels
MOST_MODES = 4
STICKY = 1 / 3  # memory of the mode from which on switches are listed
_HOP_SIGMAS = 5.0  # of the difference of two neighbours: a smaller one is noise
_SAME_HOP = 0.6  # share of the large differences that have one size
_ALTERNATING = 0.85  # share of the hops that reverse the previous one
_CLIP_SIGMAS = 3.0
_PENALTY = 3.0  # of a step of both modes, times ln(n) variances
_BINS_A_SIGMA = 2.0
_MOST_BINS = 800
_HOPS_OF_A_RARE_MODE = 10  # a few equal outliers are no mode
_FEWEST_RETURNS = 5  # visits to levels that had one before; a step in louder noise has four
_EXCURSION = 3  # values in the other mode
_RARE = 0.1  # share of the values in excursions
_LEAST_SHARE = 0.02  # least share of the values in either mode
_BOTH_MODES = 0.15  # share of the values of a base above which it has two modes
_NEAR_SHARE = 0.8  # share of the values of a mode that are near its level
_NEAR_SIGMAS = 4.0
_NEAREST = 4.0  # fraction of the gap: otherwise all values of loud noise would be near a level

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Modes:
    """place: [n] number of the mode of each value, the lowest is 0. levels: [k] distances of the
    modes from the lowest, in the unit of the values.

    held: [n] the mode of the level, that is, of the last visit too long for a switch. memory: lag-1
    autocorrelation of the mode: about 0 if each value draws its own. memory_error: its standard
    error.
    """

    place: Ints
    levels: Floats
    held: Ints
    memory: float
    memory_error: float

    @property
    def gap(self) -> float:
        """Distance of the highest mode from the lowest."""
        return float(self.levels[-1])

    @property
    def share(self) -> float:
        """Share of the values above the lowest mode."""
        return float((self.place > 0).mean())

    @property
    def switches(self) -> Ints:
        """Indices of the values in another mode than the previous one, without changes of level."""
        return run_bounds(self.offset)[1:-1]

    @property
    def offset(self) -> Floats:
        """[n] offset of each value from its level because of its mode."""
        offset: Floats = self.levels[self.place] - self.levels[self.held]
        return offset


def find_modes(
    values: Floats, *, least_noise: float, longest_visit: int, significance: float, most: int
) -> Modes | None:
    """The modes of a series [n] with any steps; None: it has none.

    least_noise: smallest sigma of a value within a mode. longest_visit: largest median visit in
    values; longer visits are levels. significance: probability that any visit of a mode is taken
    for a level. most: number of modes, at most.

    Two modes are recognized by hops: differences of neighbours that have one size, far above that
    of all others, and reverse each other. A random walk, or a level that changes and is repaired,
    has none. Then levels and modes are fitted together, as the least-cost sequence of base levels.
    A value costs its squared distance to the nearer of base and base + gap, up to a limit for
    outliers (Fearnhead and Rigaill 2019); a change of base costs a penalty. Sticky modes are also
    recognized if their gaps are small or if there are more of them, by levels that explain the
    whole series.
    """
    floor = max(least_noise, resolution_scale(values))
    found, changes = _by_hops(values, floor, longest_visit)
    if found is None or changes:
        sticky = _by_levels(values, floor, longest_visit, significance, most)
        if found is None or (sticky is not None and sticky[1].size > 2):
            found = sticky
    if found is None:
        return None
    place, levels = found
    memory, error = _memory(place, levels.size)
    held = _held(place, memory, longest_visit, significance)
    return Modes(place, levels, held, memory, error)


def _by_hops(
    values: Floats, floor: float, longest_visit: int
) -> tuple[tuple[Ints, Floats] | None, int]:
    """[n] the mode of each value, of two modes that hops show, and the levels of the modes.

    Also the number of times that both change.
    """
    hop = _hop(values, floor)
    if hop is None:
        return None, 0
    gap, sigma = hop
    for _ in range(2):  # the second time with the gap that the first one estimated
        base, slow = _bases(values, gap, sigma)
        above = values - base
        if not slow.any() or slow.all():
            return None, 0
        known, gap = gap, float(np.median(above[slow]) - np.median(above[~slow]))
        if abs(gap - known) < sigma / _BINS_A_SIGMA:
            break
    if not _are_modes(values, base, slow, gap, sigma, longest_visit):
        return None, 0
    return (slow.astype(np.int64), np.array([0.0, gap])), run_bounds(base).size - 2


def _by_levels(
    values: Floats, floor: float, longest_visit: int, significance: float, most: int
) -> tuple[Ints, Floats] | None:
    """[n] the mode of each value, of sticky modes that have any gaps, and the levels of the modes.

    The length of visits that end at a constant rate is geometric: some are short, and none is much
    longer than the others. Commits cause other visits.
    """
    found = sticky_levels(values, floor=floor, most=most)
    if found is None or not _is_left_often(found.place, longest_visit):
        return None
    visits = np.diff(run_bounds(found.place))
    # Spells of different sizes are near several levels, which no visit keeps.
    kept = np.unique(found.visits[visits > _EXCURSION]).size
    if found.levels.size > 2 and kept < found.levels.size:
        return None
    is_mode = (
        visits.size - found.levels.size >= _FEWEST_RETURNS
        and visits.min() <= np.median(visits) / 2
        and visits.max() <= _longest_by_chance(visits, significance)
        and _memory(found.place, found.levels.size)[0] >= STICKY
    )
    return (found.place, found.levels - found.levels[0]) if is_mode else None


def _hop(values: Floats, floor: float) -> tuple[float, float] | None:
    """The size of hops between two modes, and sigma of a value within one; None: no such hops."""
    moved = np.diff(values)
    size = np.abs(moved)
    if size.size < 2 * FEWEST_HOPS:
        return None
    least = _between_two_classes(size)
    large = size > least
    if not large.any():
        return None
    small = size[~large]
    noise = root_mean_square(small, floor=2 * floor)
    gap = float(np.median(size[large]))
    if noise == 0 or gap < _HOP_SIGMAS * noise:
        return None
    hops = large & (np.abs(size - gap) < max(4 * noise, gap / 8))
    same = np.count_nonzero(hops)
    if same < max(FEWEST_HOPS, _SAME_HOP * np.count_nonzero(large)):
        return None
    signs = np.sign(moved[hops])
    if np.mean(signs[1:] != signs[:-1]) < _ALTERNATING:
        return None
    return float(np.mean(size[hops])), noise / float(np.sqrt(2))


def _between_two_classes(values: Floats) -> float:
    """The threshold of values [n] with the least variance on either side (Otsu 1979)."""
    ordered = np.sort(np.minimum(values, np.quantile(values, 0.98)))
    count = np.arange(1, ordered.size)
    sums = np.cumsum(ordered)
    lower = sums[:-1] / count
    upper = (sums[-1] - sums[:-1]) / (ordered.size - count)
    between = count * (ordered.size - count) * (upper - lower) ** 2
    at = int(np.argmax(between))
    return float(ordered[at] + ordered[at + 1]) / 2


def _bases(values: Floats, gap: float, sigma: float) -> tuple[Floats, Bools]:
    """[n] the lower of the two levels at each value, and True for values in the upper mode."""
    width = sigma / _BINS_A_SIGMA
    origin = np.median(values)  # the grid moves with the values: their unit changes nothing
    values = values - origin
    both = np.concatenate([values, values - gap])
    while np.unique(np.round(both / width)).size > _MOST_BINS:
        width *= 1.5
    grid = np.unique(np.round(both / width)) * width
    low = (values[:, None] - grid) / sigma
    high = low - gap / sigma
    cost = np.minimum(np.minimum(low * low, high * high), _CLIP_SIGMAS**2)
    path = _cheapest(cost, _PENALTY * float(np.log(values.size)))
    base = grid[path]
    slow = np.abs(values - base - gap) < np.abs(values - base)
    base, slow = _put_off(values, *_nearest_alias(values, base, slow, gap, sigma), gap)
    return base + origin, slow


def _cheapest(cost: Floats, penalty: float) -> Ints:
    """[n] the column of each row, of cost [n, b], with the least total cost (Viterbi 1967)."""
    count = cost.shape[0]
    total = cost[0].copy()
    changed = np.zeros(cost.shape, dtype=np.bool_)
    best = np.zeros(count, dtype=np.int64)
    for at in range(1, count):
        cheapest = int(total.argmin())
        best[at] = cheapest
        limit = total[cheapest] + penalty
        np.greater(total, limit, out=changed[at])
        np.minimum(total, limit, out=total)
        total += cost[at]
    path = np.zeros(count, dtype=np.int64)
    path[-1] = int(total.argmin())
    for at in range(count - 1, 0, -1):
        path[at - 1] = best[at] if changed[at, path[at]] else path[at]
    return path


def _nearest_alias(
    values: Floats, base: Floats, slow: Bools, gap: float, sigma: float
) -> tuple[Floats, Bools]:
    """Assign each base with hardly more than one mode to the mode with the smaller step.

    Such a base may be the level of either mode; its few values in the other mode are outliers. The
    first base with both modes also decides for the bases before it.
    """
    base = base.copy()
    parts = list(pairwise(run_bounds(base).tolist()))
    shares = [float(slow[start:stop].mean()) for start, stop in parts]
    sure = [_BOTH_MODES < share < 1 - _BOTH_MODES for share in shares]
    anchor = sure.index(True) if True in sure else 0
    order = [(at, at + 1) for at in range(anchor - 1, -1, -1)]
    order += [(at, at - 1) for at in range(anchor + 1, len(parts))]
    for at, neighbour in order:
        if sure[at]:
            continue
        start, stop = parts[at]
        step = base[start] - base[parts[neighbour][0]]
        other = step + (gap if shares[at] > 0.5 else -gap)
        if abs(other) + sigma < abs(step):
            base[start:stop] += other - step
    return base, np.abs(values - base - gap) < np.abs(values - base)


def _put_off(values: Floats, base: Floats, slow: Bools, gap: float) -> tuple[Floats, Bools]:
    """Move changes of the base by the gap to the places where the level changes.

    The upper mode of one base and the lower mode of the next one are then the same level.
    """
    level = base + gap * slow
    moved = np.abs(np.diff(base))
    early = np.flatnonzero((moved > gap / 2) & (np.abs(np.diff(level)) < gap / 2)) + 1
    if not early.size:
        return base, slow
    base = base.copy()
    changes = np.flatnonzero(np.abs(np.diff(level)) > gap / 2) + 1
    for at in early.tolist():
        known = base[at - 1]
        others = (
            int(change)
            for change in changes[np.searchsorted(changes, at) :]
            if np.abs(level[change] - known - np.array([0.0, gap])).min() > gap / 4
        )
        base[at : next(others, base.size)] = known
    return base, np.abs(values - base - gap) < np.abs(values - base)


def _are_modes(
    values: Floats, base: Floats, slow: Bools, gap: float, sigma: float, longest_visit: int
) -> bool:
    if gap <= 0 or not _is_left_often(slow, longest_visit):
        return False
    visits = np.diff(run_bounds(slow))
    rarer = slow if slow.mean() <= 0.5 else ~slow
    share = float(rarer.mean())
    if share < _LEAST_SHARE or (share < _BOTH_MODES and visits.size - 1 < _HOPS_OF_A_RARE_MODE):
        return False
    # Outliers may have any value; those of a mode are near its level.
    about = np.abs(values - base - gap * slow)
    near = min(max(_NEAR_SIGMAS * sigma, gap / 12), gap / _NEAREST)
    return bool(np.mean(about[rarer] <= near) >= _NEAR_SHARE and np.mean(about > gap / 4) < 0.1)


def _is_left_often(place: Bools | Ints, longest_visit: int) -> bool:
    """Return True if there are enough hops, and the median visit is short enough, for modes."""
    visits = np.diff(run_bounds(place))
    median = float(np.median(visits))
    return visits.size - 1 >= max(FEWEST_HOPS, median / 3) and median <= longest_visit


def _longest_by_chance(visits: Ints, significance: float) -> float:
    """Length of a visit that one series in 1 / significance has by chance.

    Visits of a mode that ends at a constant rate are geometric; the median gives the rate. Visits
    of one value may be outliers.
    """
    longer = visits[visits > 1]
    median = np.median(longer) if longer.size else 1.0
    return float(np.log2(visits.size / significance) * median)


def _held(place: Ints, memory: float, longest_visit: int, significance: float) -> Ints:
    """[n] the mode of the last visit that is no switch.

    A visit is a level if fewer than one series in 1 / significance has such a long one by chance.
    All visits are levels if they are long after removing few and short excursions, so that a step
    of the same size as dips is still a step.
    """
    visits = np.diff(run_bounds(place))
    rest = _without_visits(place, _EXCURSION)
    if np.mean(rest != place) <= _RARE:
        between = np.diff(run_bounds(rest))
        if between.size == 1 or np.median(between) > 2 * longest_visit:
            return _without_visits(rest, longest_visit)
    if memory < STICKY:
        return np.zeros_like(place)
    by_chance = _longest_by_chance(visits, significance)
    if visits.max() <= by_chance:
        return np.zeros_like(place)
    return _without_visits(place, max(longest_visit, by_chance))


def _without_visits(place: Ints, longest: float) -> Ints:
    """[n] the mode of the last visit longer than this; before the first such visit its own."""
    bounds = run_bounds(place)
    long = bounds[:-1][np.diff(bounds) > longest]
    if not long.size:
        return np.zeros_like(place)
    return np.repeat(place[long], np.diff([0, *long[1:], place.size]))


def _memory(place: Ints, count: int) -> tuple[float, float]:
    """Memory of the mode, of this many, and its standard error, that of a binomial share.

    It is estimated from the share of visits that last one value, so that a change of frequency does
    not count as memory.
    """
    hops = np.diff(place) != 0
    number = int(np.count_nonzero(hops))
    left = np.count_nonzero(hops[1:] & hops[:-1]) / number
    chance = count / (count - 1)
    return 1 - chance * left, chance * float(np.sqrt(left * (1 - left) / number))
