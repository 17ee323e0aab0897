"""Two levels that a series visits in turn, not far above its noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter

from flexq_bench.stats.log_series import Floats, difference_scale, root_mean_square

_SMOOTH = 5  # values
_FITS = 3  # of the levels and of the path between them
_GAP_SIGMAS = 2.5  # least distance of the levels
_CLIP_SIGMAS = 3.0
# Cost of a hop in variances: twice the log odds that a value stays on the level of the previous one
_HOP = 5.0
# Largest variance about the levels, relative to the innovations of an AR(1) process
_SHARE_OF_INNOVATIONS = 0.6

Bools = NDArray[np.bool_]


def two_levels(values: Floats, *, floor: float) -> tuple[Bools, float] | None:
    """[n] True for a value on the upper level, and the gap between the levels; None: no two levels.

    floor: smallest sigma of a value. A hidden Markov model of two states with Gaussian noise: a
    value between the levels belongs to the level of its neighbours. The levels must explain the
    series [n] clearly better than AR(1) memory does.
    """
    sigma = difference_scale(values, floor=floor)
    smooth = median_filter(values, _SMOOTH, mode="nearest")
    upper = smooth > between_two_classes(smooth)
    for _ in range(_FITS):
        if sigma == 0 or not upper.any() or upper.all():
            return None
        low, high = float(np.median(values[~upper])), float(np.median(values[upper]))
        if high - low < _GAP_SIGMAS * sigma:
            return None
        upper = _cheapest_path(values, low, high, sigma)
        beyond = _CLIP_SIGMAS * sigma
        rest = values - np.where(upper, high, low)
        sigma = root_mean_square(np.clip(rest, -beyond, beyond), floor=floor)
    if high - low < _GAP_SIGMAS * root_mean_square(rest, floor=floor):
        return None
    about = np.clip(values, low - beyond, high + beyond)
    about = about - about.mean()
    power = float(about @ about)
    phi = float(about[1:] @ about[:-1]) / power
    innovations = power / about.size * (1 - phi * phi)
    return (upper, high - low) if sigma * sigma < _SHARE_OF_INNOVATIONS * innovations else None


def between_two_classes(values: Floats) -> float:
    """The threshold of values [n] with the least variance on either side (Otsu 1979)."""
    ordered = np.sort(np.minimum(values, np.quantile(values, 0.98)))
    count = np.arange(1, ordered.size)
    sums = np.cumsum(ordered)
    lower = sums[:-1] / count
    upper = (sums[-1] - sums[:-1]) / (ordered.size - count)
    between = count * (ordered.size - count) * (upper - lower) ** 2
    at = int(np.argmax(between))
    return float(ordered[at] + ordered[at + 1]) / 2


def _cheapest_path(values: Floats, low: float, high: float, sigma: float) -> Bools:
    """[n] True for the upper of two levels, on the path with the least total cost (Viterbi 1967).

    A value costs its squared distance from its level, up to a limit for outliers; a hop costs
    `_HOP`.
    """
    # Plain floats: with `_cheapest` of modes.py, which is for hundreds of levels, all change points
    # of a series with two levels take half as long again.
    costs = [
        np.minimum(((values - level) / sigma) ** 2, _CLIP_SIGMAS**2).tolist()
        for level in (low, high)
    ]
    lower, upper = costs[0][0], costs[1][0]
    hops: list[tuple[bool, bool]] = []  # into the lower and the upper level
    for at_low, at_high in zip(costs[0][1:], costs[1][1:], strict=True):
        hops.append((upper + _HOP < lower, lower + _HOP < upper))
        lower, upper = min(lower, upper + _HOP) + at_low, min(upper, lower + _HOP) + at_high
    path = [upper < lower]
    for hop in reversed(hops):
        path.append(path[-1] ^ hop[path[-1]])
    return np.array(path[::-1], dtype=np.bool_)
