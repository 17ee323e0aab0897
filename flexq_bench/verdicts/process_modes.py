"""Kernels that run at one of two speeds in each process: classification of the processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexq_bench.stats.log_series import SCALE_FLOOR, Floats

_MIN_MODE_PROCESSES = 2
_MIN_PROCESSES = 5  # of both sides
# The gap between the modes, relative to the scatter within. Two series of six Gaussian values have
# so wide a gap less than once in 2,000 times (tests/verdicts/test_process_modes.py).
_MIN_GAP_SIGMAS = 10.0
_MIN_LOG_GAP = 0.01  # ln: a smaller gap hides no change that counts

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ProcessModes:
    """base, head: [processes] ln of the times. base_slow, head_slow: True for each slow process.

    gap: ln, of the slow mode over the fast one.
    """

    base: Floats
    head: Floats
    base_slow: Bools
    head_slow: Bools
    gap: float

    @property
    def slow_base(self) -> int:
        return int(np.count_nonzero(self.base_slow))

    @property
    def slow_head(self) -> int:
        return int(np.count_nonzero(self.head_slow))

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the difference in the number of slow processes, by Fisher's exact
        test.
        """
        slow, total = self.slow_base + self.slow_head, self.base.size + self.head.size
        chances = [
            math.comb(self.base.size, k) * math.comb(self.head.size, slow - k)
            for k in range(max(0, slow - self.head.size), min(slow, self.base.size) + 1)
        ]
        seen = chances[self.slow_base - max(0, slow - self.head.size)]
        return min(
            sum(chance for chance in chances if chance <= seen) / math.comb(total, slow), 1.0
        )

    @property
    def in_words(self) -> str:
        return (
            f"two speeds {math.expm1(self.gap):.1%} apart, each compared with the same speed: "
            f"{self.slow_base} of {self.base.size} processes of base are slow, "
            f"{self.slow_head} of {self.head.size} of head"
        )

    def difference(self) -> tuple[float, float, int]:
        """head - base among processes of one mode: estimate, standard error, degrees of freedom.

        Least squares fit of two modes and one step between the sides, the same in both modes. If
        each side has a single process in a mode, and these two disagree with the other mode, the
        error includes the disagreement.
        """
        estimate, weight = self._step()
        scatter, freedom = self.scatter()
        return estimate, scatter / math.sqrt(weight), freedom

    def scatter(self) -> tuple[float, int]:
        """Sigma of a process from the mean of its mode and side, and its degrees of freedom."""
        step, _ = self._step()
        squares = 0.0
        for slow in (False, True):
            of_mode = np.concatenate(
                [self.base[self.base_slow == slow], self.head[self.head_slow == slow] - step]
            )
            squares += float(np.sum((of_mode - of_mode.mean()) ** 2))
        freedom = self.base.size + self.head.size - 3
        return math.sqrt(squares / freedom), freedom

    def _step(self) -> tuple[float, float]:
        """The step between the sides, and its evidence in equivalent numbers of processes."""
        weights, differences = [], []
        for slow in (False, True):
            base = self.base[self.base_slow == slow]
            head = self.head[self.head_slow == slow]
            if base.size and head.size:
                weights.append(base.size * head.size / (base.size + head.size))
                differences.append(float(head.mean() - base.mean()))
        return float(np.average(differences, weights=weights)), sum(weights)


def process_modes(base: Floats, head: Floats) -> ProcessModes | None:
    """The two speeds of processes, from ln of their times [n] of either commit; None: one speed.

    The sorted times of both commits have one gap that is far wider than the scatter on either side
    of it. At least one commit has processes on both sides of the gap, which is not the case for a
    step. Each side of the gap has at least two processes, and both commits have processes in at
    least one mode.
    """
    times = np.concatenate([base, head])
    ordered = np.sort(times)
    gaps = np.diff(ordered)[_MIN_MODE_PROCESSES - 1 : ordered.size - _MIN_MODE_PROCESSES]
    if gaps.size == 0 or times.size < _MIN_PROCESSES:
        return None
    split = int(gaps.argmax()) + _MIN_MODE_PROCESSES
    low, high = ordered[:split], ordered[split:]
    gap = float(high.mean() - low.mean())
    limit = (low[-1] + high[0]) / 2
    base_slow, head_slow = base > limit, head > limit
    if not any(slow.any() and not slow.all() for slow in (base_slow, head_slow)):
        return None
    modes = ProcessModes(base, head, base_slow, head_slow, gap)
    # A step between the sides does not count as scatter.
    scatter, _ = modes.scatter()
    if gap < max(_MIN_GAP_SIGMAS * max(scatter, SCALE_FLOOR / 2), _MIN_LOG_GAP):
        return None
    return modes
