"""Change points of a whole series, looking back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flexq_bench.regress.series import (
    Floats,
    autocorrelation,
    positive_logs,
    step_proof_autocorrelation,
    step_proof_scale,
    without_spikes,
)

SHORTEST_SEGMENT = 3
POINTS_BEFORE_FIRST = 10
SMALLEST_CHANGE = 0.01  # relative
SIGNIFICANCE = 0.01
MODE_VISITS = 3
FEWEST_POINTS = POINTS_BEFORE_FIRST + SHORTEST_SEGMENT
# A candidate costs this times ln(n) variances. The search proposes, the permutations decide: lower
# than 3 takes longer and finds no more, higher loses three points on a level of 3 sigma.
_PENALTY = 3.0
_PERMUTATIONS = 999
_FIRST_LOOK = 99
_CACHED_POINTS = 256
_BATCH_VALUES = 1_000_000


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """Where the level of a series changed.

    index: of the first value on the new level, in the series as given.
    mean_before, mean_after: of the neighbouring segments without spikes, in the unit of the series.
    relative_change: mean_after / mean_before - 1.
    p_value: of the largest step anywhere in the two segments, by permutation; at least 0.001.
    """

    index: int
    mean_before: float
    mean_after: float
    relative_change: float
    p_value: float


def change_points(
    values: ArrayLike,
    *,
    smallest_change: float = SMALLEST_CHANGE,
    significance: float = SIGNIFICANCE,
    seed: int = 0,
) -> tuple[ChangePoint, ...]:
    """The changes of level of a series of positive numbers, oldest first.

    values: [n], any unit. What is NaN, infinite, zero or negative is a gap. A series of less than
    13 usable values has no change point, as has a constant one: the answer is empty, never an
    error. A level holds for at least 3 values, 10 come before the first change, and a change is at
    least `smallest_change` of the level before. Going back and forth between two levels, on each of
    them at least three times, is noise with two modes and no change.

    Search: optimal partition of the logarithms under a linear kernel, which is least squares
    (Killick et al. 2012; ruptures' KernelCPD), after single spikes are replaced. Test: the largest
    step in the two segments that meet at a change, against `seed`ed permutations of the values
    there, made independent first by taking out their AR(1) memory. The weakest change goes until
    all of them pass. Raises ValueError if values is not one-dimensional.
    """
    logs, index = positive_logs(values)
    if logs.size < FEWEST_POINTS:
        return ()
    cleaned = without_spikes(logs)
    bounds = _search(cleaned)
    p_values = _prune(cleaned, bounds, np.log1p(smallest_change), significance, seed)
    modes = _mode_hops(cleaned, bounds)
    levels = np.exp(cleaned)
    found = []
    for before, at, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        if at < POINTS_BEFORE_FIRST or at in modes:
            continue
        mean_before, mean_after = float(levels[before:at].mean()), float(levels[at:after].mean())
        change = mean_after / mean_before - 1
        found.append(ChangePoint(int(index[at]), mean_before, mean_after, change, p_values[at]))
    return tuple(found)


def _search(logs: Floats) -> list[int]:
    """Boundaries of the best segments, 0 and n among them."""
    from ruptures import KernelCPD  # near a second: `import flexq_bench.regress` does not pay it

    phi = step_proof_autocorrelation(logs)
    # The variance of a mean of n AR(1) values is this over n; differences of neighbours see less.
    sigma = step_proof_scale(logs) * np.sqrt(1 + phi) / (1 - phi)
    scaled = (logs - np.median(logs)) / sigma
    if float(np.ptp(scaled)) == 0:
        return [0, logs.size]
    search = KernelCPD(kernel="linear", min_size=SHORTEST_SEGMENT).fit(scaled[:, None])
    ends = search.predict(pen=_PENALTY * float(np.log(logs.size)))
    return [0, *(int(end) for end in ends)]


def _prune(
    logs: Floats, bounds: list[int], smallest: float, significance: float, seed: int
) -> dict[int, float]:
    """Take boundaries that are no change out of `bounds`; the p-value of each that stays."""
    while len(bounds) > 2:
        means = [float(logs[a:b].mean()) for a, b in pairwise(bounds)]
        steps = np.abs(np.diff(means))
        weakest = int(steps.argmin())
        if steps[weakest] >= smallest:
            break
        del bounds[weakest + 1]
    while True:
        phi = autocorrelation(_residuals(logs, bounds), levels=len(bounds) - 1)
        p_values = {
            at: _step_p_value(logs[before:after], phi, seed)
            for before, at, after in zip(bounds, bounds[1:], bounds[2:], strict=False)
        }
        if not p_values or max(p_values.values()) <= significance:
            return p_values
        bounds.remove(max(p_values, key=lambda at: p_values[at]))


def _mode_hops(logs: Floats, bounds: list[int]) -> set[int]:
    """Boundaries between two levels that the series is on at least MODE_VISITS times each."""
    means = np.array([float(logs[a:b].mean()) for a, b in pairwise(bounds)])
    hops = set()
    for at, before, after in zip(bounds[1:-1], means, means[1:], strict=False):
        near = abs(after - before) / 4
        visits = [np.count_nonzero(np.abs(means - level) < near) for level in (before, after)]
        if min(visits) >= MODE_VISITS:
            hops.add(at)
    return hops


def _residuals(logs: Floats, bounds: list[int]) -> Floats:
    return np.concatenate([logs[a:b] - logs[a:b].mean() for a, b in pairwise(bounds)])


def _step_p_value(logs: Floats, phi: float, seed: int) -> float:
    """How often a random order of these values shows a step as large as the largest here.

    A Monte Carlo p-value that stops early where it is clearly large (Besag and Clifford 1991).
    """
    innovations = logs - logs.mean()
    innovations[1:] -= phi * innovations[:-1]
    innovations[0] *= 1 - phi
    innovations -= innovations.mean()
    observed = float(_largest_step(innovations[None, :])[0]) * (1 - 1e-9)
    first = _exceeding(innovations, observed, seed, slice(0, _FIRST_LOOK))
    if first >= _FIRST_LOOK // 10:
        return (1 + first) / (1 + _FIRST_LOOK)
    rest = _exceeding(innovations, observed, seed, slice(_FIRST_LOOK, _PERMUTATIONS))
    return (1 + first + rest) / (1 + _PERMUTATIONS)


def _exceeding(values: Floats, observed: float, seed: int, which: slice) -> int:
    """How many of these permutations have a step of at least `observed`."""
    if values.size <= _CACHED_POINTS:
        shuffled = values[_orders(values.size, seed)[which]]
        return int(np.count_nonzero(_largest_step(shuffled) >= observed))
    rng = np.random.default_rng((seed, values.size, which.start))
    batch = max(1, _BATCH_VALUES // values.size)
    exceeding = 0
    for start in range(which.start, which.stop, batch):
        rows = np.tile(values, (min(batch, which.stop - start), 1))
        steps = _largest_step(rng.permuted(rows, axis=1, out=rows))
        exceeding += int(np.count_nonzero(steps >= observed))
    return exceeding


@lru_cache(maxsize=_CACHED_POINTS)
def _orders(size: int, seed: int) -> NDArray[np.int16]:
    """[permutations, size] random orders: the same ones serve every series of this length.

    Of all lengths together they take 66 MB.
    """
    rng = np.random.default_rng((seed, size))
    orders = np.tile(np.arange(size, dtype=np.int16), (_PERMUTATIONS, 1))
    return rng.permuted(orders, axis=1)


def _largest_step(rows: Floats) -> Floats:
    """[r] of rows [r, n] that sum to 0: the largest CUSUM statistic of a change of mean."""
    size = rows.shape[1]
    left = np.arange(SHORTEST_SEGMENT, size - SHORTEST_SEGMENT + 1)
    sums = np.cumsum(rows, axis=1)[:, left[0] - 1 : left[-1]]
    np.abs(sums, out=sums)
    sums *= 1 / np.sqrt(left * (size - left))
    largest: Floats = sums.max(axis=1)
    return largest
