"""Levels that a series visits in turn, not far above its noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import median_filter

from flexq_bench.stats.log_series import (
    Floats,
    Ints,
    difference_scale,
    robust_scale,
    root_mean_square,
    run_bounds,
)

_SMOOTH = 5  # values
_FITS = 5  # of the levels and of the path between them
_GAP_SIGMAS = 2.5  # least distance of the levels
_CLIP_SIGMAS = 3.0  # of two levels: one value is no visit, because it costs less than two hops
_CLIP_OF_MORE = 4.0  # of three and more
# Cost of a hop in variances: twice the log odds that a value stays on the level of the previous one
_HOP = 5.0
# Largest variance about the levels, relative to the innovations of an AR(1) process
_SHARE_OF_INNOVATIONS = 0.6
_PLAUSIBLE_SHARE = 0.7  # the same before the fit, where differences of neighbours include hops
_LEAST_SHARE = 0.02  # of the values on a level, before the fit
_ALIKE = 3.0  # largest ratio of the noise on two levels, before the fit
_STEP = 3.0  # cost of a step of all levels, times ln(n) variances
_MOST_SHIFTS = 96
_MOST_APART = 4.0  # variance of the means of visits about their levels, relative to noise
_TOGETHER = 2.0  # the same below which no further level is needed
_BINS = 64


@dataclass(frozen=True, slots=True)
class StickyLevels:
    """place: [n] number of the level of each value, the lowest is 0. levels: [k], ascending.

    sigma: of a value from its level. cost: minus twice the log likelihood, with a penalty for each
    level and each hop.
    """

    place: Ints
    levels: Floats
    sigma: float
    cost: float

    @property
    def visits(self) -> Ints:
        """The level of each visit, in their order."""
        return self.place[run_bounds(self.place)[:-1]]


def sticky_levels(values: Floats, *, floor: float, most: int) -> StickyLevels | None:
    """The levels that a series [n] visits in turn, at most this many; None: it has none.

    floor: smallest sigma of a value. A hidden Markov model with Gaussian noise: a value between two
    levels belongs to the level of its neighbours. The number of levels has the largest penalized
    likelihood. The levels must explain the series clearly better than AR(1) memory does, and the
    series must go back and forth between them. All levels may change once by the same amount, which
    is left to the caller.
    """
    fits = _fits(values, floor, most)
    if not fits:
        return None
    explaining = [one for one in fits if _explains(values, one, floor)]
    best = explaining[0] if explaining else None
    if fits[0].levels.size > 2 and not (
        best is fits[0] and len(explaining) == 1 and _are_used_throughout(best)
    ):
        stepped = _with_one_step(values, floor, most)
        limit = fits[0].cost if best is fits[0] else np.inf
        if stepped is not None and stepped.cost + _STEP * float(np.log(values.size)) < limit:
            return stepped
    return best


def _fits(values: Floats, floor: float, most: int) -> list[StickyLevels]:
    """Plausible levels, the least cost first."""
    sigma = difference_scale(values, floor=floor)
    if sigma == 0:
        return []
    smooth = median_filter(values, _SMOOTH, mode="nearest")
    beyond = _CLIP_SIGMAS * sigma
    limit = _PLAUSIBLE_SHARE * _innovations(
        np.clip(values, smooth.min() - beyond, smooth.max() + beyond)
    )
    if sigma * sigma >= limit:
        return []
    fits: list[StickyLevels] = []
    for count, place in zip(range(2, most + 1), _classes(smooth, most), strict=True):
        if fits and _apart(values, fits[0]) <= _TOGETHER:
            break
        parts = [values[place == one] for one in range(count)]
        scales = [float(robust_scale(part, floor=floor)) for part in parts if part.size]
        # A step widens two levels as much as they are apart.
        if count == 2 or (
            min(part.size for part in parts) >= _LEAST_SHARE * values.size
            and max(scales) ** 2 < limit
            and max(scales) <= _ALIKE * min(scales)
        ):
            found = _fitted(values, place, count, sigma, floor)
            if found is not None:
                fits = sorted([*fits, found], key=lambda one: one.cost)
    return fits


def _are_mixed(found: StickyLevels) -> bool:
    """Return True if the series goes between any two groups of the levels more than twice.

    After a step of all levels, it goes from one group to another once, and twice if the step is
    reverted.
    """
    count = found.levels.size
    groups = (np.arange(1, 2 ** (count - 1))[:, None] >> np.arange(count)) & 1
    return bool((np.count_nonzero(np.diff(groups[:, found.visits]), axis=1) > 2).all())


def _are_used_throughout(found: StickyLevels) -> bool:
    """Return True if each level is visited in both halves of the visits."""
    count = found.levels.size
    return all(np.unique(half).size == count for half in np.array_split(found.visits, 2))


def _with_one_step(values: Floats, floor: float, most: int) -> StickyLevels | None:
    """The levels with the least cost that all change once by the same amount; None: there are none.

    One half of the series has no step, so the levels are those of either half.
    """
    best = None
    for half in np.array_split(values, 2):
        parts = _fits(half, floor, most)
        if not parts:
            continue
        part = parts[0]
        base, place = _one_step(values, part.levels, part.sigma)
        rest = values - base
        found = _fitted(rest, place, part.levels.size, part.sigma, floor)
        if found is None or not _explains(rest, found, floor):
            continue
        if best is None or found.cost < best.cost:
            best = found
    return best


def _one_step(values: Floats, levels: Floats, sigma: float) -> tuple[Floats, Ints]:
    """[n] the least-cost shift of all levels before and after one step, and the nearest level."""
    beyond = _GAP_SIGMAS * sigma
    low = float(np.quantile(values, 0.02)) - levels[-1] - beyond
    high = float(np.quantile(values, 0.98)) - levels[0] + beyond
    shifts = np.linspace(low, high, min(_MOST_SHIFTS, int((high - low) / sigma * 2) + 2))
    about = values - shifts[:, None]
    distance = np.abs(about[:, :, None] - levels).min(axis=2) / sigma
    before = np.cumsum(np.minimum(distance, _clip(levels.size)) ** 2, axis=1)
    after = before[:, -1:] - before
    at = int((before.min(axis=0) + after.min(axis=0))[:-1].argmin())
    base = np.full(values.size, shifts[after[:, at].argmin()])
    base[: at + 1] = shifts[before[:, at].argmin()]
    return base, np.abs((values - base)[:, None] - levels).argmin(axis=1).astype(np.int64)


def _clip(count: int) -> float:
    """The largest distance, in sigma, that counts of a value from one of this many levels."""
    return _CLIP_SIGMAS if count == 2 else _CLIP_OF_MORE


def _fitted(
    values: Floats, place: Ints, count: int, sigma: float, floor: float
) -> StickyLevels | None:
    """Fit this many levels to values [n], which start in these classes; None: some are too near."""
    hop = _HOP + 2 * float(np.log(count - 1))
    levels = np.zeros(0)
    for fit in range(_FITS):
        if np.unique(place).size < count:
            return None
        levels = np.array([float(np.median(values[place == one])) for one in range(count)])
        if not fit:
            # Differences of neighbours include hops.
            sigma = min(sigma, float(robust_scale(values - levels[place], floor=floor)))
        if sigma == 0 or float(np.diff(levels).min()) < _GAP_SIGMAS * sigma:
            return None
        before, place = place, _cheapest_path(values, levels, sigma, hop)
        beyond = _clip(count) * sigma
        rest = np.clip(values - levels[place], -beyond, beyond)
        sigma = root_mean_square(rest, floor=floor)
        if fit and np.array_equal(before, place):
            break
    hops = run_bounds(place).size - 2
    parameters = float(np.log(values.size)) * count
    cost = 2 * values.size * float(np.log(sigma)) + hops * hop + parameters
    return StickyLevels(place, levels, sigma, cost)


def _explains(values: Floats, found: StickyLevels, floor: float) -> bool:
    """Return True if levels explain values [n] clearly better than AR(1) memory does.

    Three or more levels must also be those of all visits: steps of different sizes are near some
    level as well.
    """
    levels, sigma = found.levels, found.sigma
    rest = values - levels[found.place]
    beyond = _clip(levels.size) * sigma
    if levels.size == 2:
        if levels[1] - levels[0] < _GAP_SIGMAS * root_mean_square(rest, floor=floor):
            return False
    elif not _are_mixed(found) or _apart(values, found) > _MOST_APART:
        return False
    about = np.clip(values, levels[0] - beyond, levels[-1] + beyond)
    return sigma * sigma < _SHARE_OF_INNOVATIONS * _innovations(about)


def _apart(values: Floats, found: StickyLevels) -> float:
    """Variance of the means of visits about their levels, relative to what noise causes."""
    beyond = _clip(found.levels.size) * found.sigma
    rest = np.clip(values - found.levels[found.place], -beyond, beyond)
    bounds = run_bounds(found.place)
    sizes = np.diff(bounds)
    sums = np.add.reduceat(rest, bounds[:-1])
    explained = float((sums * sums / sizes).sum())
    within = max(float(rest @ rest) - explained, 0.0) / max(rest.size - sizes.size, 1)
    return explained / sizes.size / within if within else float("inf")


def _innovations(values: Floats) -> float:
    """Variance of the innovations of values [n] as an AR(1) process."""
    about = values - values.mean()
    power = float(about @ about)
    if power == 0:
        return 0.0
    phi = float(about[1:] @ about[:-1]) / power
    return float(power / about.size * (1 - phi * phi))


def _classes(values: Floats, most: int) -> Iterator[Ints]:
    """[n] the class of each value, of two classes with the least variance, of three and so on.

    The exact ones of a histogram (Fisher 1958).
    """
    low, high = float(values.min()), float(values.max())
    width = (high - low) / _BINS or 1.0
    bins = np.minimum(((values - low) / width).astype(np.int64), _BINS - 1)
    size = np.concatenate(([0.0], np.cumsum(np.bincount(bins, minlength=_BINS))))
    total = np.concatenate(([0.0], np.cumsum(np.bincount(bins, values - low, minlength=_BINS))))
    # [i, j]: what a class of the bins from i up to j adds to the variance between classes
    sizes, totals = size - size[:, None], total - total[:, None]
    between = np.where(sizes > 0, totals * totals / np.maximum(sizes, 1.0), 0.0)
    between[np.tril_indices(_BINS + 1, -1)] = -np.inf
    best, cuts = between[0], []
    for _ in range(most - 1):
        sums = best[:, None] + between
        cuts.append(sums.argmax(axis=0))
        best = sums.max(axis=0)
        end, edges = _BINS, []
        for cut in reversed(cuts):
            end = int(cut[end])
            edges.append(end)
        yield np.searchsorted(np.array(edges[::-1]), bins, side="right").astype(np.int64)


def _cheapest_path(values: Floats, levels: Floats, sigma: float, hop: float) -> Ints:
    """[n] the level of each value, on the path with the least total cost (Viterbi 1967).

    A value costs its squared distance from its level, up to a limit for outliers.
    """
    # Plain floats: with `_cheapest` of modes.py, which is for hundreds of levels, all change points
    # of a series with two levels take half as long again.
    distances = (values[:, None] - levels) / sigma
    costs = np.minimum(distances * distances, _clip(levels.size) ** 2).tolist()
    total = costs[0]
    entered: list[tuple[int, list[bool]]] = []  # the cheapest level, and the levels it hops into
    for row in costs[1:]:
        least = min(total)
        limit = least + hop
        entered.append((total.index(least), [one > limit for one in total]))
        total = [min(one, limit) + cost for one, cost in zip(total, row, strict=True)]
    place = total.index(min(total))
    path = [place]
    for cheapest, hops in reversed(entered):
        if hops[place]:
            place = cheapest
        path.append(place)
    return np.array(path[::-1], dtype=np.int64)
