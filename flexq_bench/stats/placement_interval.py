"""Confidence interval of a time that was measured over several placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flexq_bench.stats.bootstrap import Interval, hierarchical_interval

Floats = NDArray[np.float64]
# Standard normal quantile of the interval that tells the error of a placement's median.
_NORMAL = 1.96
# Placements are added until the interval is narrow, which takes two points of the coverage of an
# interval that is exact for a given number (benchmarks/verdicts/placement_intervals.py): of the
# chance of missing, signed ranks are given so much.
_SHARE_OF_MISSES = 0.6


def placement_interval(
    placements: Sequence[ArrayLike], *, seed: int, confidence: float = 0.95
) -> Interval:
    """Interval of the typical median of a placement, where placements are added until it is narrow.

    placements: one array [samples] a placement, finite. Where samples explain the spread of the
    medians, these are all but symmetric and have one mode: `signed_rank_interval` then needs a
    third less of them. Elsewhere placements may have speeds of their own, and it is
    `hierarchical_interval`, whose errors this raises.
    """
    if len(placements) > 1 and samples_explain_spread(placements):
        exact = 1 - _SHARE_OF_MISSES * (1 - confidence)
        medians = [float(np.median(np.asarray(one))) for one in placements]
        return signed_rank_interval(medians, confidence=exact)
    return hierarchical_interval(placements, seed=seed, confidence=confidence)


def samples_explain_spread(placements: Sequence[ArrayLike]) -> bool:
    """Whether the scatter of samples explains half or more of the variance of placement medians.

    placements: one array [samples] a placement; two at least.
    """
    ordered = [np.sort(np.asarray(one, dtype=np.float64)) for one in placements]
    medians = [np.median(one) for one in ordered]
    explained = np.mean([_median_error(one) ** 2 for one in ordered])
    return bool(np.var(medians, ddof=1) <= 2 * explained)


def signed_rank_interval(values: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Hodges-Lehmann estimate of the centre of a symmetric distribution, and its interval.

    values: [n] independent, in any unit. The median of all means of pairs, a value with itself too,
    and the means whose Wilcoxon signed-rank test does not reject them; exact for any symmetric
    distribution (Hollander, Wolfe and Chicken 2014, section 3.3). Fewer than 6 values give their
    whole range, which covers 93.75 % for 5. Raises ValueError if there is no value.
    """
    one = np.asarray(values, dtype=np.float64)
    if one.ndim != 1 or one.size == 0:
        raise ValueError("an interval needs a one-dimensional array of at least one value")
    first, second = np.triu_indices(one.size)
    means = np.sort((one[first] + one[second]) / 2)
    left_out = _left_out(one.size, (1 - confidence) / 2)
    low, high = means[left_out], means[-1 - left_out]
    return Interval(float(np.median(means)), float(low), float(high))


@lru_cache(maxsize=1024)
def _left_out(n: int, tail: float) -> int:
    """How many of the sorted means of pairs of n values lie outside at each end."""
    # How often each signed-rank sum comes up among the 2^n sets of signs.
    shares = np.zeros(n * (n + 1) // 2 + 1)
    shares[0] = 1.0
    for rank in range(1, n + 1):
        shares[rank:] = shares[rank:] + shares[: shares.size - rank]
        shares /= 2
    # Sums up to k have at most this chance: the k + 1st mean is the first inside.
    outside = int(np.searchsorted(np.cumsum(shares), tail, side="right"))
    return max(0, outside - 1)


def _median_error(ordered: Floats) -> float:
    """Standard error of the median of sorted samples, from the distance of order statistics.

    McKean and Schrader 1984, "A comparison of methods for Studentizing the sample median".
    """
    rank = max(1, round((ordered.size + 1) / 2 - _NORMAL * math.sqrt(ordered.size) / 2))
    return float(ordered[-rank] - ordered[rank - 1]) / (2 * _NORMAL)
