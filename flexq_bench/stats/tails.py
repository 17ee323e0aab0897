"""Tails of paired losses: a loss that a few segments carry, which a mean can hide."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.block_bootstrap import few_blocks_factor
from flexq_bench.stats.bootstrap import Floats, Interval

TAIL_SHARE = 0.05
_RESAMPLES = 1000


def tail_excess(values: ArrayLike, *, seed: int, confidence: float = 0.95) -> Interval:
    """Return by how much the largest values exceed the smallest: the sum of both tails' means.

    values: [n], finite, n >= 2, in the order of the text; TAIL_SHARE of them, at least one, is in
    each tail. The mean of a tail is the expected shortfall (Acerbi and Tasche 2002, J. Bank.
    Finance 26:1487). Noise has tails of equal size and a sum near 0; damage to a few segments adds
    to the upper tail alone. Bootstrap of blocks of n^(1/3) neighbours, which may be correlated
    (circular, Politis and Romano 1992), with ends moved outwards as in `mean_difference_interval`.
    Raises ValueError if there are fewer than two values or one is not finite.
    """
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or given.size < 2 or not np.isfinite(given).all():
        raise ValueError(f"values must be finite, [n], at least two, got {given.shape}")
    count = tail_size(given.size)

    def excess(rows: Floats) -> Floats:
        ordered = np.sort(rows, axis=-1)
        sums: Floats = ordered[..., -count:].mean(axis=-1) + ordered[..., :count].mean(axis=-1)
        return sums

    estimate = float(excess(given))
    rng, block = np.random.default_rng(seed), round(given.size ** (1 / 3))
    starts = rng.integers(given.size, size=(_RESAMPLES, math.ceil(given.size / block), 1))
    places = (starts + np.arange(block)).reshape(_RESAMPLES, -1)[:, : given.size] % given.size
    tail, wider = (1 - confidence) / 2, few_blocks_factor(given.size, confidence)
    low, high = np.quantile(excess(given[places]), (tail, 1 - tail)) - estimate
    return Interval(
        estimate, estimate + wider * min(float(low), 0.0), estimate + wider * max(float(high), 0.0)
    )


def tail_size(count: int) -> int:
    """Return the number of `count` values that are in each tail."""
    return max(1, math.ceil(TAIL_SHARE * count - 1e-9))
