"""Ratios of measured times and their geometric mean, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexq_bench.stats.bootstrap import Interval


def ratio_interval(numerator: Interval, denominator: Interval) -> Interval:
    """Confidence interval of numerator / denominator from the intervals of the two.

    Both > 0, in one unit and at one confidence level, which is also the result's; the result has no
    unit. The estimates are assumed to be independent. On a log scale, where the ratio is a
    difference, the distances to the ends that act in the same direction add in quadrature: the
    method of variance estimates recovery (Zou and Donner 2008, Statistics in Medicine 27,
    1693-1702), which keeps asymmetric intervals asymmetric. Raises ValueError if a value is not
    positive and finite.
    """
    top = _logs(numerator)
    bottom = _logs(denominator)
    estimate = top.estimate - bottom.estimate
    below = math.hypot(top.estimate - top.low, bottom.high - bottom.estimate)
    above = math.hypot(top.high - top.estimate, bottom.estimate - bottom.low)
    return Interval(math.exp(estimate), math.exp(estimate - below), math.exp(estimate + above))


def _logs(interval: Interval) -> Interval:
    values = (interval.estimate, interval.low, interval.high)
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"a ratio needs positive finite times, got {interval}")
    return Interval(*map(math.log, values))


def geometric_mean(ratios: Sequence[Interval]) -> Interval:
    """Geometric mean of ratios, with the interval that follows from theirs.

    The ratios are > 0, at one confidence level, and assumed to be independent. On a log scale the
    mean's distance to an end is the root of the summed squares of their distances, divided by their
    number (Zou and Donner 2008, as in `ratio_interval`). The interval is the measurement error of
    the mean of these cases, and does not describe how much cases differ. Raises ValueError if there
    is no ratio, or one is not positive and finite.
    """
    if not ratios:
        raise ValueError("a mean needs at least one ratio")
    logs = [_logs(ratio) for ratio in ratios]
    count = len(logs)
    mean = math.fsum(log.estimate for log in logs) / count
    below = math.hypot(*(log.estimate - log.low for log in logs)) / count
    above = math.hypot(*(log.high - log.estimate for log in logs)) / count
    return Interval(math.exp(mean), math.exp(mean - below), math.exp(mean + above))
