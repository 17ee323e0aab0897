"""Variance components: the noise that each level of a hierarchy adds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flexq_bench.stats.log_series import Floats

_Ints = NDArray[np.int64]


def variance_components(values: ArrayLike, levels: Sequence[ArrayLike]) -> tuple[float, ...]:
    """Standard deviation that each level adds, coarsest first; last: of values within the finest.

    values: [n] in any unit, finite; for logarithms the result is relative. levels: for each level a
    label [n] per value; a label counts within its group of the coarser level, so placements may be
    numbered anew in each process. Groups may differ in size. Method of moments: sums of squares
    equal their expectations, exactly also for unequal groups (Searle, Casella and McCulloch 1992,
    section 5.3); a variance estimated below 0 is set to 0. NaN for a level without two groups to
    compare. Raises ValueError if lengths differ or a value is not finite.
    """
    y = np.asarray(values, dtype=np.float64)
    labels = [np.asarray(level) for level in levels]
    if y.ndim != 1 or any(level.shape != y.shape for level in labels):
        raise ValueError("every level needs one label a value")
    if not np.isfinite(y).all():
        raise ValueError("values must be finite: leave out what was not measured")
    # From all values together (one group) to each value separately.
    groups = [np.zeros(y.size, dtype=np.int64)]
    for level in labels:
        groups.append(_within(groups[-1], level))
    groups.append(np.arange(y.size))
    variances: list[float] = []  # finest first
    for depth in range(len(groups) - 1, 0, -1):
        parent, own = groups[depth - 1], groups[depth]
        freedom = _count(own) - _count(parent)
        squares = float(np.sum((_means(y, own) - _means(y, parent)) ** 2))
        for step, variance in enumerate(variances):
            finer = groups[len(groups) - 1 - step]
            share = _spread(finer, own) - _spread(finer, parent)
            squares -= share * (0.0 if np.isnan(variance) else variance)
        weight = _spread(own, own) - _spread(own, parent)
        variances.append(max(0.0, squares / weight) if freedom > 0 else float("nan"))
    return tuple(float(np.sqrt(variance)) for variance in reversed(variances))


def _within(group: _Ints, level: NDArray[np.generic]) -> _Ints:
    """One number for each pair of a group and a label in it."""
    _, numbered = np.unique(level, return_inverse=True)
    _, inner = np.unique(np.stack([group, numbered]), axis=1, return_inverse=True)
    return inner.reshape(-1).astype(np.int64)


def _count(group: _Ints) -> int:
    return int(np.unique(group).size)


def _means(y: Floats, group: _Ints) -> Floats:
    """[n] the mean of each value's group."""
    sizes = np.bincount(group)
    means: Floats = (np.bincount(group, weights=y) / np.maximum(sizes, 1))[group]
    return means


def _spread(finer: _Ints, coarser: _Ints) -> float:
    """Sum over groups g of `coarser` of sum of n_h^2 / n_g over the groups h of `finer` in g."""
    sizes = np.bincount(finer)[finer]  # [n], of each value's finer group
    return float(np.sum(sizes / np.bincount(coarser)[coarser]))
