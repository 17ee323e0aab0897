"""Run-to-run noise: the deviation of the time of one run from the level of its series.

The interval of a median describes the uncertainty within one run. Another run of the same commit
has another time because of other allocations, another temperature, or other load on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from flexq_bench.stats.bootstrap import Interval
from flexq_bench.stats.log_series import (
    SCALE_FLOOR,
    Floats,
    positive_logs,
    robust_scale,
    step_proof_autocorrelation,
)

MIN_CHANGES = 4  # differences of consecutive runs; fewer give no sigma
_MIN_CLIPPED_CHANGES = 8  # differences; the scale of fewer is too uncertain for clipping
_MAX_SIGMAS = 3.5
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class RunNoise:
    """Deviation of single runs from the level of their series.

    sigma: standard deviation of ln(time). degrees: degrees of freedom of the estimate; infinite:
    the value is exact.
    """

    sigma: float
    degrees: float

    def half_width(self, runs: int) -> float:
        """Half of the 95 % interval (ln) of the value of one run, or of the ratio of two.

        By Student's t, for the sum of that many independent errors.
        """
        if math.isinf(self.degrees):
            quantile = float(special.ndtri((1 + _CONFIDENCE) / 2))
        else:
            quantile = float(special.stdtrit(self.degrees, (1 + _CONFIDENCE) / 2))
        return quantile * self.sigma * math.sqrt(runs)


def run_noise(stretches: Sequence[ArrayLike]) -> RunNoise | None:
    """The noise of a series, estimated from differences of neighbouring runs; None: too few.

    stretches: each [n] positive times of one epoch, in any unit, oldest first. A change of level
    affects only the difference at that place, which is clipped at 3.5 robust sigmas. The mean
    square of the differences is twice the variance (von Neumann 1941), and has 2 m² / (3 m - 1)
    degrees of freedom, m the number of differences. Autocorrelated noise differs less between
    neighbours, so its variance is divided by 1 - phi. Raises ValueError as `positive_logs`.
    """
    logs = [positive_logs(stretch)[0] for stretch in stretches]
    changes = np.concatenate([np.diff(log) for log in logs]) if logs else np.empty(0)
    longest = max(logs, key=len, default=np.empty(0))
    # Minus two standard errors, because a short series with one jump has no long memory.
    uncertain = 2.8 / math.sqrt(max(longest.size, 1))
    memory = max(step_proof_autocorrelation(longest) - uncertain, 0.0)
    return noise_of_changes(changes, memory=memory)


def noise_of_changes(changes: Floats, *, memory: float = 0.0) -> RunNoise | None:
    """The noise from the differences themselves: changes [m], ln of a run over the previous one.

    memory: lag-1 autocorrelation phi of the noise, in [0, 1). None: fewer than MIN_CHANGES.
    """
    count = int(changes.size)
    if count < MIN_CHANGES:
        return None
    if count >= _MIN_CLIPPED_CHANGES:
        limit = _MAX_SIGMAS * float(robust_scale(changes, floor=SCALE_FLOOR / 2))
        changes = np.clip(changes, -limit, limit)
    variance = float(np.mean(changes**2)) / 2 / (1 - memory)
    return RunNoise(math.sqrt(variance), 2 * count**2 / (3 * count - 1))


def larger_noise(*estimates: RunNoise | None) -> RunNoise | None:
    """The noise with the wider interval; None: there is none."""
    known = [noise for noise in estimates if noise is not None]
    return max(known, key=lambda one: one.half_width(1), default=None)


def with_run_noise(interval: Interval, noise: RunNoise | None, *, runs: int = 1) -> Interval:
    """The interval of the level, from that of a measured value > 0 in any unit.

    runs: 1 for the time of one run, 2 for a ratio of two separate runs. The two uncertainties are
    independent: on a log scale distances to the ends add in quadrature. noise None: the interval is
    unchanged. Raises ValueError if a value is not positive.
    """
    if noise is None:
        return interval
    if min(interval.low, interval.estimate) <= 0:
        raise ValueError(f"noise of logarithms needs positive values, got {interval}")
    half = noise.half_width(runs)
    below = math.hypot(math.log(interval.estimate / interval.low), half)
    above = math.hypot(math.log(interval.high / interval.estimate), half)
    return Interval(
        interval.estimate, interval.estimate * math.exp(-below), interval.estimate * math.exp(above)
    )
