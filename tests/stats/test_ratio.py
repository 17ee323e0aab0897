"""The interval of a ratio of two medians."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexq_bench.stats import (
    Interval,
    geometric_mean,
    median_interval,
    ratio_interval,
)


def test_exact_denominator_only_scales():
    ratio = ratio_interval(Interval(40.0, 38.0, 44.0), Interval(10.0, 10.0, 10.0))

    assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((4.0, 3.8, 4.4))


def test_a_slower_denominator_makes_the_ratio_smaller():
    ratio = ratio_interval(Interval(40.0, 40.0, 40.0), Interval(10.0, 10.0, 12.5))

    assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((4.0, 3.2, 4.0))


def test_the_inverse_ratio_has_the_inverse_interval():
    a, b = Interval(40.0, 37.0, 41.0), Interval(10.0, 9.9, 11.0)

    ratio, inverse = ratio_interval(a, b), ratio_interval(b, a)

    assert (inverse.estimate, inverse.low, inverse.high) == pytest.approx(
        (1 / ratio.estimate, 1 / ratio.high, 1 / ratio.low)
    )


def test_ratio_interval_has_its_coverage():
    rng = np.random.default_rng(2)
    trials = 400
    covered = 0
    for trial in range(trials):
        base = median_interval(40 * rng.lognormal(0.0, 0.10, 60), seed=trial)
        head = median_interval(20 * rng.lognormal(0.0, 0.05, 60), seed=trial + trials)
        ratio = ratio_interval(base, head)
        covered += ratio.low <= 2.0 <= ratio.high

    assert 0.91 <= covered / trials <= 0.985


@pytest.mark.parametrize("low", [0.0, -1.0, math.nan, math.inf])
def test_invalid_times_are_refused(low):
    with pytest.raises(ValueError, match="positive finite"):
        ratio_interval(Interval(1.0, low, 1.0), Interval(1.0, 1.0, 1.0))


def test_mean_of_equal_ratios_has_a_narrower_interval():
    mean = geometric_mean([Interval(2.0, 1.8, 2.2)] * 4)

    assert mean.estimate == pytest.approx(2.0)
    assert math.log(2.0 / mean.low) == pytest.approx(math.log(2.0 / 1.8) / 2)
    assert math.log(mean.high / 2.0) == pytest.approx(math.log(2.2 / 2.0) / 2)


def test_mean_of_a_ratio_and_its_inverse_is_one():
    there, back = Interval(4.0, 3.8, 4.4), Interval(0.25, 1 / 4.4, 1 / 3.8)

    mean = geometric_mean([there, back])

    assert mean.estimate == pytest.approx(1.0)
    assert mean.low == pytest.approx(1 / mean.high)


def test_geometric_mean_interval_has_its_coverage():
    rng = np.random.default_rng(3)
    sigmas = np.array([0.01, 0.02, 0.05])
    covered, trials = 0, 1000
    for _ in range(trials):
        logs = rng.normal(math.log(1.5), sigmas)
        ends = 1.959964 * sigmas
        ratios = [
            Interval(math.exp(log), math.exp(log - end), math.exp(log + end))
            for log, end in zip(logs, ends, strict=True)
        ]
        mean = geometric_mean(ratios)
        covered += mean.low <= 1.5 <= mean.high

    assert 0.93 <= covered / trials <= 0.97


def test_no_ratio_has_no_mean():
    with pytest.raises(ValueError, match="at least one"):
        geometric_mean([])
