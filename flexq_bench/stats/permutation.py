"""Permutation tests: how often chance alone makes a step as large as the observed one."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flexq_bench.stats.log_series import Floats

AnyFloats = NDArray[np.float32] | NDArray[np.float64]

_PERMUTATIONS = 999
_FIRST_LOOK = 99
_CACHED_POINTS = 256
_BATCH_VALUES = 1_000_000
_LENGTH_RATIO = 1.6  # between the lengths of levels that are tried: a finer grid finds no more


def contrast(values: Floats, before: int, at: int, after: int) -> float:
    """Difference of the means of values[before:at] and values[at:after] over its standard error.

    The error is that of values with a standard deviation of 1. Always positive.
    """
    left, right = values[before:at], values[at:after]
    weight = np.sqrt(left.size * right.size / (after - before))
    return float(abs(left.mean() - right.mean()) * weight)


def step_p_value(values: Floats, observed: float, *, first: int, shortest: int, seed: int) -> float:
    """How often a random order of the values has a `contrast` of at least `observed` somewhere.

    values: [n], exchangeable if there is no step. first: the smallest index a step may have.
    shortest: length of a level. Contrasts looked at: of everything before an index and everything
    after; of a level and all the rest; of two levels of the same length side by side; lengths grow
    geometrically. A Monte Carlo p-value, at least 0.001, that stops early where it is clearly large
    (Besag and Clifford 1991).
    """
    centered = values - values.mean()
    limit = observed * (1 - 1e-4)  # of equal contrasts, in single precision

    def exceeding(which: slice) -> int:
        return _exceeding(centered, limit, first, shortest, seed, which)

    early = exceeding(slice(0, _FIRST_LOOK))
    if early >= _FIRST_LOOK // 10:
        return (1 + early) / (1 + _FIRST_LOOK)
    late = exceeding(slice(_FIRST_LOOK, _PERMUTATIONS))
    return (1 + early + late) / (1 + _PERMUTATIONS)


def _exceeding(
    values: Floats, limit: float, first: int, shortest: int, seed: int, which: slice
) -> int:
    """How many of these permutations have a contrast of at least `limit`."""
    if values.size <= _CACHED_POINTS:
        columns = values.astype(np.float32)[_orders(values.size, seed)[:, which]]
        return int(np.count_nonzero(_largest_contrast(columns, first, shortest) >= limit))
    rng = np.random.default_rng((seed, values.size, which.start))
    batch = max(1, _BATCH_VALUES // values.size)
    exceeding = 0
    for start in range(which.start, which.stop, batch):
        rows = np.tile(values, (min(batch, which.stop - start), 1))
        rng.permuted(rows, axis=1, out=rows)
        exceeding += int(np.count_nonzero(_largest_contrast(rows.T, first, shortest) >= limit))
    return exceeding


@lru_cache(maxsize=_CACHED_POINTS)
def _orders(size: int, seed: int) -> NDArray[np.int16]:
    """[size, permutations] random orders: the same ones serve every series of this length.

    Of all lengths together they take 66 MB.
    """
    rng = np.random.default_rng((seed, size))
    orders = np.tile(np.arange(size, dtype=np.int16), (_PERMUTATIONS, 1))
    return np.ascontiguousarray(rng.permuted(orders, axis=1).T)


def _largest_contrast(columns: AnyFloats, first: int, shortest: int) -> AnyFloats:
    """[r] of columns [n, r] that sum to 0."""
    size = columns.shape[0]
    sums = np.zeros((size + 1, columns.shape[1]), dtype=columns.dtype)
    np.cumsum(columns, axis=0, out=sums[1:])
    at = np.arange(first, size - shortest + 1)
    weight = np.sqrt(size / (at * (size - at))).astype(columns.dtype)
    largest: AnyFloats = (np.abs(sums[at]) * weight[:, None]).max(axis=0)
    length = shortest
    while 2 * length <= size - shortest:
        level = sums[length:] - sums[:-length]  # of the level that starts at i, [n - length + 1, r]
        inner = level[max(first - length, shortest) : size - length - shortest + 1]
        if inner.size:
            scale = float(np.sqrt(size / (length * (size - length))))
            np.maximum(largest, _extreme(inner) * scale, out=largest)
        beside = level[max(first, length) :] - level[max(first, length) - length : -length]
        if beside.size:
            np.maximum(largest, _extreme(beside) / float(np.sqrt(2 * length)), out=largest)
        length = max(length + 1, int(length * _LENGTH_RATIO))
    return largest


def _extreme(columns: AnyFloats) -> AnyFloats:
    largest: AnyFloats = np.maximum(columns.max(axis=0), -columns.min(axis=0))
    return largest
