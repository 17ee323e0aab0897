"""Noise with modes: levels that a series visits again and again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexq_bench.stats.log_series import Floats

STICKY = 1 / 3  # memory of the mode from which on a visit, and not a night, is what chance draws
MODE_RETURNS = 3  # there and back is a change and its repair, and so it may be twice
FEWEST_VISITS_A_SIDE = 2  # of a step: it must outlast the modes' own hopping
_PERMUTATIONS = 999
_SWAPS_A_VISIT = 5

Ints = NDArray[np.int64]


def has_modes(means: Floats) -> bool:
    """Whether levels, [v] oldest first, return at least three times to one that was left before.

    A return is nearer to the earlier level than a quarter of every hop that leads to it.
    """
    hops = np.abs(np.diff(means))
    returns = 0
    for at in range(2, means.size):
        near = np.minimum(hops[at - 1], hops[: at - 1]) / 4
        returns += bool(np.any(np.abs(means[: at - 1] - means[at]) < near))
    return returns >= MODE_RETURNS


def mode_memory(logs: Floats, means: Floats) -> float:
    """Lag-1 autocorrelation of the mode that a night is in: about 0 where each night draws its own.

    logs: [n] with its spikes. means: [v] of its visits. From the hops between neighbouring nights,
    half of the usual one or more: one that is stayed with is followed by none, one of a single
    night by its opposite. Steps of all modes are few among them. At least -1, at most 1.
    """
    hops = np.abs(np.diff(means))
    largest, closest = float(hops.max()), float(np.median(hops)) / 2
    moved = np.clip(np.diff(logs), -largest, largest)
    moved[np.abs(moved) < closest] = 0
    power = float(moved @ moved)
    return 1.0 if power == 0 else 1 + 2 * float(moved[1:] @ moved[:-1]) / power


def mode_steps(
    visits: Floats,
    bounds: list[int],
    *,
    first: int,
    smallest: float,
    significance: float,
    seed: int,
) -> dict[int, float]:
    """Steps of all modes together, index and p-value, by binary segmentation.

    visits: [v] means, ln. bounds: [v + 1] indices where they begin, and n. A visit is what chance
    draws: its mean counts once, however long it was. Random orders of the visits, in which
    neighbours are not on the same mode, tell how large a step hopping makes. first: the smallest
    index a step may have. smallest: ln.
    """
    p_values: dict[int, float] = {}
    parts = [(0, visits.size)]
    while parts:
        start, stop = parts.pop()
        if stop - start < 2 * FEWEST_VISITS_A_SIDE:
            continue
        means = visits[start:stop] - visits[start:stop].mean()
        steps = _contrasts(means[None, :])[0]
        split = int(steps.argmax()) + FEWEST_VISITS_A_SIDE
        at = bounds[start + split]
        if at < first or abs(means[:split].mean() - means[split:].mean()) < smallest:
            continue
        largest = _contrasts(_shuffled(means, seed)).max(axis=1)
        exceeding = np.count_nonzero(largest >= steps.max() * (1 - 1e-6))
        p_value = float(1 + exceeding) / (1 + _PERMUTATIONS)
        if p_value <= significance:
            p_values[at] = p_value
            parts += [(start, start + split), (start + split, stop)]
    return p_values


def _contrasts(rows: Floats) -> Floats:
    """[r, splits] of rows [r, n] that sum to 0: CUSUM statistics of a change of mean."""
    size = rows.shape[1]
    left = np.arange(FEWEST_VISITS_A_SIDE, size - FEWEST_VISITS_A_SIDE + 1)
    sums: Floats = np.abs(np.cumsum(rows, axis=1)[:, left - 1])
    sums *= np.sqrt(size / (left * (size - left)))
    return sums


def _shuffled(means: Floats, seed: int) -> Floats:
    """[permutations, v] random orders whose neighbours differ by half of the usual hop or more.

    A Markov chain of swaps, each undone where it brings two closer; it starts from the order seen,
    which makes the test a little careful.
    """
    closest = float(np.median(np.abs(np.diff(means)))) / 2
    rng = np.random.default_rng((seed, means.size))
    row = np.arange(_PERMUTATIONS)
    rows = np.tile(np.concatenate(([np.inf], means, [np.inf])), (_PERMUTATIONS, 1))
    swaps = (_SWAPS_A_VISIT * means.size, 2, _PERMUTATIONS)
    for one, other in rng.integers(1, means.size + 1, size=swaps):
        _swap(rows, row, one, other)
        undone = np.zeros(_PERMUTATIONS, dtype=np.bool_)
        for at in (one, other):
            here = rows[row, at]
            undone |= np.abs(here - rows[row, at - 1]) < closest
            undone |= np.abs(here - rows[row, at + 1]) < closest
        _swap(rows, row[undone], one[undone], other[undone])
    return rows[:, 1:-1]


def _swap(rows: Floats, row: Ints, one: Ints, other: Ints) -> None:
    rows[row, one], rows[row, other] = rows[row, other], rows[row, one]
