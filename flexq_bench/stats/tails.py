"""Tails of paired losses: a loss that a few segments carry, which a mean can hide."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from flexq_bench.stats.bootstrap import Interval
from flexq_bench.stats.planned_mean import Spread

TAIL_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class TailExcess:
    """By how much the largest values exceed the smallest. error: standard error of the estimate.

    freedom: degrees of freedom of the error.
    """

    estimate: float
    error: float
    freedom: int

    def reach(self, tail: float) -> float:
        """Distance that the error exceeds with this probability, to one side."""
        return -float(special.stdtrit(self.freedom, tail)) * self.error

    @property
    def interval(self) -> Interval:
        """The estimate with its interval of 95 %."""
        reach = self.reach(0.025)
        return Interval(self.estimate, self.estimate - reach, self.estimate + reach)


def tail_excess(values: ArrayLike) -> TailExcess:
    """Return the sum of both tails' means.

    values: [n], finite, n >= 2, in the order of the text; TAIL_SHARE of them, at least one, is in
    each tail. The mean of a tail is the expected shortfall (Acerbi and Tasche 2002, J. Bank.
    Finance 26:1487). Noise has tails of equal size and a sum near 0; damage to a few segments adds
    to the upper tail alone. The sum is the mean of each value's influence on it, so its error is
    that of a mean of autocorrelated values (Spread). It is as uncertain as the few clusters of
    neighbours that make a tail (runs, Smith and Weissman 1994, J. R. Stat. Soc. B 56:515). Raises
    ValueError if there are fewer than two values or one is not finite.
    """
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or given.size < 2 or not np.isfinite(given).all():
        raise ValueError(f"values must be finite, [n], at least two, got {given.shape}")
    count, ordered = tail_size(given.size), np.sort(given)
    low, high = ordered[count - 1], ordered[-count]
    share = count / given.size
    influence = high + low + (np.maximum(given - high, 0) - np.maximum(low - given, 0)) / share
    spread = Spread.of(influence)
    clusters = max(2, min(_clusters(given >= high), _clusters(given <= low)))
    error = float(spread.deviation) * math.sqrt(clusters / (clusters - 1) / given.size)
    return TailExcess(float(influence.mean()), error, min(spread.freedom, clusters - 1))


def _clusters(beyond: NDArray[np.bool_]) -> int:
    """Number of runs of True."""
    return int(np.count_nonzero(np.diff(beyond.astype(np.int8), prepend=0) == 1))


def tail_size(count: int) -> int:
    """Return the number of `count` values that are in each tail."""
    return max(1, math.ceil(TAIL_SHARE * count - 1e-9))
