"""Quantiles over the tokens of segments, with their intervals, and factors of other intervals.

Tokens of a segment are correlated, segments hardly are. Therefore segments are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from flexq_bench.stats.bootstrap import Interval


def block_quantile_intervals(
    values: ArrayLike, shares: Sequence[float], *, confidence: float = 0.95
) -> tuple[Interval, ...]:
    """The quantiles of all values, each with its interval by segments.

    values: [segments, tokens], finite. shares: in (0, 1], for example 0.99: the smallest value that
    at least this share of the values does not exceed; 1: the maximum. An end is the nearest value
    that more, or fewer, values exceed than chance explains (Woodruff 1952), by Student's t of the
    segments' numbers of such values: of the estimate or of the end, whichever scatter more. A
    maximum, and a quantile of one segment, have no interval: both ends are then the estimate.
    Raises ValueError if there is no value, one is not finite, or a share is not in (0, 1].
    """
    blocks = np.asarray(values, dtype=np.float64)
    if blocks.ndim != 2 or blocks.size == 0 or not np.isfinite(blocks).all():
        raise ValueError(f"values must be finite, [segments, tokens], got {blocks.shape}")
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares must be above 0 and at most 1, got {list(shares)}")
    count, size = len(blocks), blocks.size
    falling = -np.sort(-blocks, axis=1)
    order = np.argsort(-falling, axis=None, kind="stable")
    ordered, beyond = falling.ravel()[order], np.arange(size)  # `beyond` values exceed each
    # A segment's number grows from r to r + 1 by its value of rank r, and its square by 2 r + 1.
    growth = 2 * (order % blocks.shape[1]) + 1
    squares = np.cumsum(growth) - growth
    variance = (squares - beyond**2 / count) / max(1, count - 1)
    student = special.stdtrit(max(1, count - 1), (1 + confidence) / 2)
    reach = student * np.sqrt(count * np.maximum(0.0, variance))

    def interval(share: float) -> Interval:
        wanted = max(0, math.ceil(share * size - 1e-9) - 1)
        place = size - 1 - wanted
        estimate = float(ordered[place])
        if share == 1 or count < 2:
            return Interval(estimate, estimate, estimate)
        clear = np.abs(beyond - (1 - share) * size) >= np.maximum(reach, reach[place])
        fewer, more = np.flatnonzero(clear[:place]), np.flatnonzero(clear[place + 1 :])
        high = ordered[fewer[-1] if fewer.size else 0]
        low = ordered[place + 1 + more[0] if more.size else -1]
        return Interval(estimate, float(low), float(high))

    return tuple(interval(share) for share in shares)


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
