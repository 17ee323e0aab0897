"""The test of one step: of the most likely position in a stretch of a series."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from flexq_bench.stats.log_series import (
    MAD_TO_SIGMA,
    MAX_AUTOCORRELATION,
    SAME_VALUE,
    Floats,
    autocorrelation,
    difference_scale,
    effective_size,
    mean,
    median,
    resolution_scale,
    step_proof_autocorrelation,
    without_spikes,
)
from flexq_bench.stats.step_likelihood import WITHIN, best_place, innovation_variance, step_costs

FEWEST_POINTS = 8  # fewer values give no estimate of their noise
SHORTEST_LEVEL = 3  # one or two values are an outlier, which no commit needs to explain
SURROUNDINGS = 60  # values on either side that describe the noise next to a step
_NO_NOISE = 1e-6  # of the range of the values: the resolution of the arithmetic
CLIP_SIGMAS = 3.5  # beyond it a value is an outlier, which must not move the mean of a side
_SHARED = 16.0  # values that the other side's variance counts for: a new side has only few
_MOST_COUNTED = 20.0  # independent values of a side: levels wander, so more make it no surer
# Independent positions of a step whose shorter side has m of n values: n / m times this, since a
# look at every commit adds new ones.
_TRIALS = 48.0
_MUCH_BETTER = 12.0  # twice the gain in log likelihood; fewer are curves, more hide steps of drifts


@dataclass(frozen=True, slots=True)
class NewestStep:
    """A possible step of a stretch of values.

    place: of the first value on the new level. before, after: means of the 60 values next to it,
    without outliers. p_value: probability of a step as large anywhere in noise.
    """

    place: int
    before: float
    after: float
    p_value: float

    @property
    def effect(self) -> float:
        return self.after - self.before


def newest_step(
    values: Floats, seen: int, counted: float | None = None, noise: float = 0.0
) -> NewestStep | None:
    """The most likely step of values [n], by Student's t with AR(1) memory and a sign test.

    None: all values are equal.

    seen: number of values of the series so far, for the number of positions that were tested. The
    step has at least 3 values on either side; [n] has at least 8. counted: most independent values
    of a side, if not 20. noise: least sigma of a value. A slope that fits as well as the step, and
    hardly better with it, gives a p-value of 1.
    """
    spread = float(np.ptp(values))
    if spread <= SAME_VALUE * float(np.abs(values).max()):
        return None
    floor = max(resolution_scale(values), _NO_NOISE * spread, noise)
    cleaned = without_spikes(values, difference_scale(values, floor=floor))
    memory = step_proof_autocorrelation(cleaned, floor=floor)
    places = np.arange(SHORTEST_LEVEL, values.size - SHORTEST_LEVEL + 1)
    costs, information = step_costs(cleaned - mean(cleaned), places, memory)
    at = int(places[int(np.argmin(costs))])
    beside = cleaned[max(at - SURROUNDINGS, 0) : at], cleaned[at : at + SURROUNDINGS]
    left, right = _without_outliers(*beside, floor)
    before, after = mean(left), mean(right)
    residuals = np.concatenate((left - before, right - after))
    memory = max(_memory(residuals), memory - float(np.sqrt(2 / cleaned.size)))
    variances = _variances(residuals[: left.size], residuals[left.size :], floor)
    sizes = at, values.size - at
    errors = [
        variance / min(float(effective_size(size, memory)), counted or _MOST_COUNTED)
        for variance, size in zip(variances, sizes, strict=True)
    ]
    # Welch 1947: the variance of a new side is known from few values.
    freedom = sum(errors) ** 2 / sum(
        error * error / (side.size - 1 + _SHARED)
        for error, side in zip(errors, (left, right), strict=True)
    )
    t = abs(after - before) / float(np.sqrt(sum(errors)))
    p_value = 2 * float(special.stdtr(freedom, -t))
    by_sign = seen * _sign_test(*beside, before, after)
    p_value = min(max(p_value * _TRIALS * seen / min(sizes), by_sign), 1.0)
    if p_value == 1.0 or _is_slope(np.concatenate((left, right)), residuals, left.size):
        return NewestStep(at, before, after, 1.0)
    sigma = float(np.sqrt(max(variances)))
    # An outlier, or what was before the level before, hardly moves the step.
    limit = CLIP_SIGMAS * sigma
    usual = np.clip(cleaned, min(before, after) - limit, max(before, after) + limit)
    costs, information = step_costs(usual - before, places, memory)
    best = best_place(costs, information, innovation_variance(costs, values.size, sigma))
    place = int(places[best])
    return NewestStep(place if abs(place - at) <= WITHIN else at, before, after, p_value)


def _without_outliers(left: Floats, right: Floats, floor: float) -> tuple[Floats, Floats]:
    middles = float(median(left)), float(median(right))
    about = left - middles[0], right - middles[1]
    limit = max(MAD_TO_SIGMA * float(median(np.abs(np.concatenate(about)))), floor)
    limit *= CLIP_SIGMAS
    return (
        middles[0] + np.clip(about[0], -limit, limit),
        middles[1] + np.clip(about[1], -limit, limit),
    )


def _sign_test(left: Floats, right: Floats, before: float, after: float) -> float:
    """Probability of as many values on the right beyond the middle of the levels.

    Each value is beyond it with the share that the left has: a series of two speeds has some of
    the slow ones there, whose variance a mean without outliers does not show.
    """
    beyond_left, beyond = (
        int(np.count_nonzero((side > (before + after) / 2) == (after > before)))
        for side in (left, right)
    )
    return float(special.bdtrc(beyond - 1, right.size, beyond_left / left.size)) if beyond else 1.0


def _memory(residuals: Floats) -> float:
    """AR(1) memory about two levels, one standard error above its estimate, in [0, 0.8]."""
    phi = autocorrelation(residuals, levels=2)
    return min(phi + float(np.sqrt((1 - phi * phi) / residuals.size)), MAX_AUTOCORRELATION)


def _variances(left: Floats, right: Floats, floor: float) -> list[float]:
    """Variance of one value on either side, from the residuals of both."""
    squares = float(left @ left), float(right @ right)
    pooled = sum(squares) / (left.size + right.size - 2)
    return [
        max((square + _SHARED * pooled) / (size - 1 + _SHARED), floor * floor)
        for square, size in zip(squares, (left.size, right.size), strict=True)
    ]


def _is_slope(values: Floats, residuals: Floats, place: int) -> bool:
    """Return True if a straight line fits values [n] as well as the step with these residuals.

    Then there is still a step if the line fits much better with one. place: of the step. Each is
    compared with its own AR(1) memory.
    """
    time = np.arange(values.size) - (values.size - 1) / 2
    centered = values - mean(values)
    about_line = _innovations(centered - float(time @ centered) / float(time @ time) * time)
    if about_line > _innovations(residuals) * (1 + 2 / values.size):
        return False
    both = np.stack((np.ones(values.size), time, time > time[place - 1]), axis=1)
    rest = values - both @ np.linalg.lstsq(both, values, rcond=None)[0]
    return about_line <= _innovations(rest) * (1 + _MUCH_BETTER / values.size)


def _innovations(residuals: Floats) -> float:
    """Sum of squared AR(1) innovations, with the memory that these residuals have."""
    now, last = residuals[1:], residuals[:-1]
    power = float(last @ last)
    memory = min(max(float(now @ last) / power, 0.0), MAX_AUTOCORRELATION) if power else 0.0
    rest = now - memory * last
    return float(rest @ rest)
