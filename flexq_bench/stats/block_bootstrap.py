"""Means and quantiles over the tokens of segments, with intervals by the bootstrap over segments.

Tokens of a segment are correlated, segments hardly are. Therefore whole segments are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from flexq_bench.stats.bootstrap import Interval

_MAX_RESAMPLES = 1000
_MIN_RESAMPLES = 200
_MAX_DRAWS = 200_000_000  # weighted tokens for one set of intervals


def block_quantile_intervals(
    values: ArrayLike, shares: Sequence[float], *, seed: int, confidence: float = 0.95
) -> tuple[Interval, ...]:
    """The quantiles of all values, each with its bootstrap interval over segments.

    values: [segments, tokens], finite. shares: in (0, 1], for example 0.99: the smallest value that
    at least this share of the values does not exceed; 1: the maximum. A resample draws segments
    with replacement (Efron and Tibshirani 1993, section 8.6). With few segments, or few values
    beyond a quantile, the ends are moved outwards as in `mean_difference_interval`. The
    bootstrap is not valid for a maximum (the same, section 7.4) or for one segment: both ends
    are then the estimate. Raises ValueError if there is no value, one is not finite, or a share
    is not in (0, 1].
    """
    blocks = np.asarray(values, dtype=np.float64)
    if blocks.ndim != 2 or blocks.size == 0 or not np.isfinite(blocks).all():
        raise ValueError(f"values must be finite, [segments, tokens], got {blocks.shape}")
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares must be above 0 and at most 1, got {list(shares)}")
    count, length = blocks.shape
    order = np.argsort(blocks, axis=None, kind="stable")
    ordered, owner = blocks.ravel()[order], (order // length).astype(np.intp)
    wanted = np.array([max(0, math.ceil(share * blocks.size - 1e-9) - 1) for share in shares])
    estimates = ordered[wanted]
    if count < 2:
        return tuple(Interval(float(e), float(e), float(e)) for e in estimates)
    rng = np.random.default_rng(seed)
    resamples = max(_MIN_RESAMPLES, min(_MAX_RESAMPLES, _MAX_DRAWS // blocks.size))
    weights = rng.multinomial(count, np.full(count, 1 / count), size=resamples)
    drawn = ordered[_weighted_places(owner, weights, wanted)]
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail), axis=0)
    # A high quantile is as uncertain as the few values beyond it.
    beyond = np.maximum(2, np.minimum(count, blocks.size - wanted))
    return tuple(
        _interval(share, estimate, below, above, few_blocks_factor(int(few), confidence))
        for share, estimate, below, above, few in zip(
            shares, estimates, low, high, beyond, strict=True
        )
    )


def _weighted_places(
    owner: NDArray[np.intp], weights: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.intp]:
    """Places in the order of all values, [resamples, shares], of the wanted ones of each resample.

    owner: the block of each value, in that order. weights: [resamples, blocks], how often a block
    was drawn. Sums over runs of values narrow each search to one run, about the square root of
    their number, whose values are then counted one by one.
    """
    length = math.isqrt(owner.size - 1) + 1
    runs, blocks = -(-owner.size // length), weights.shape[1]
    cells = np.arange(owner.size) // length * blocks + owner
    in_runs = np.bincount(cells, minlength=runs * blocks).reshape(runs, blocks)
    # Values drawn up to the end of each run. Counts are exact in float64, whose product is faster.
    reached = weights.astype(np.float64) @ np.cumsum(in_runs, axis=0).T.astype(np.float64)
    padded = np.append(owner, np.full(runs * length - owner.size, owner[-1]))
    places = np.empty((len(weights), len(wanted)), dtype=np.intp)
    every = np.arange(len(weights))
    for share, rank in enumerate(wanted):
        run = (reached <= rank).sum(axis=1)
        before = np.where(run > 0, reached[every, run - 1], 0)
        members = padded.reshape(runs, length)[run]
        counted = before[:, None] + np.cumsum(weights[every[:, None], members], axis=1)
        places[:, share] = run * length + (counted <= rank).sum(axis=1)
    return places


def few_blocks_factor(count: int, confidence: float = 0.95) -> float:
    """Factor by which an interval over few blocks is too narrow (Hesterberg 2015, section 4)."""
    tail = (1 - confidence) / 2
    student = float(special.stdtrit(count - 1, tail) / special.ndtri(tail))
    return student * math.sqrt(count / (count - 1))


def wider_than_95(count: int, alpha: float) -> float:
    """Half-width of an interval with error probability alpha at one end, relative to that of 95 %.

    For the mean of `count` values, by Student's quantiles, as few_blocks_factor.
    """
    freedom = count - 1
    return float(special.stdtrit(freedom, alpha) / special.stdtrit(freedom, 0.025))


def distinct_blocks(blocks: ArrayLike) -> NDArray[np.intp]:
    """Indices of the rows [blocks, …] that no earlier row equals, in order."""
    rows = np.asarray(blocks)
    _, first = np.unique(rows.reshape(len(rows), -1), axis=0, return_index=True)
    return np.sort(first)


def _interval(share: float, estimate: float, low: float, high: float, wider: float) -> Interval:
    if share == 1:
        return Interval(float(estimate), float(estimate), float(estimate))
    return Interval(
        float(estimate),
        float(estimate + wider * min(low - estimate, 0.0)),
        float(estimate + wider * max(high - estimate, 0.0)),
    )
