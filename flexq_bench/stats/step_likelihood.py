"""Likelihood of the position of one step in AR(1) noise, with both levels estimated."""

from __future__ import annotations

import numpy as np

from flexq_bench.stats.log_series import Floats, Ints

WITHIN = 5  # largest error of a position that still leads people to the commit
_EXACT = 0.05  # additional score of the exact position
_LEAST = 0.1  # of the sigma of one value: lower limit of the noise


def step_costs(values: Floats, places: Ints, memory: float) -> tuple[Floats, Floats]:
    """Sums of squared innovations [k] of a step at each position, and ln of their information.

    values: [n], with AR(1) memory. places: [k], positions of the first value after the step, 1 to n
    - 1. The levels minimize the sum (generalized least squares). The information is the determinant
    of the normal equations; the log likelihood loses half of its logarithm when the levels are
    integrated out.
    """
    rest = values[1:] - memory * values[:-1]
    jumps = rest[places - 1]
    sums = np.concatenate(([0.0], np.cumsum(rest)))
    kept = 1 - memory
    left = kept * sums[places - 1] - memory * jumps
    right = kept * (sums[-1] - sums[places]) + jumps
    left_weight = kept * kept * (places - 1) + memory * memory
    right_weight = kept * kept * (values.size - 1 - places) + 1
    information = left_weight * right_weight - memory * memory
    explained = right_weight * left * left + 2 * memory * left * right + left_weight * right * right
    total = float(rest @ rest)
    return np.maximum(total - explained / information, 0), np.log(information)


def best_place(costs: Floats, log_information: Floats, variance: float) -> int:
    """Index of the position to report, of neighbouring positions with these costs [k].

    It maximizes the expected score: 1 if the step is within 5 values of it, and a twentieth more
    if it is exact. If noise leaves several positions possible, the result is close to most of them.
    variance: of an innovation.
    """
    minus_2_ln = costs / variance + log_information
    posterior = np.exp((minus_2_ln.min() - minus_2_ln) / 2)
    near = np.convolve(posterior, np.ones(2 * WITHIN + 1))[WITHIN : WITHIN + costs.size]
    return int(np.argmax(near + _EXACT * posterior))


def innovation_variance(costs: Floats, size: int, sigma: float) -> float:
    """Variance of an innovation at the best of these positions of a step among `size` values."""
    return max(float(costs.min()) / max(size - 4, 1), (_LEAST * sigma) ** 2)
