"""The interval of a ratio of two medians."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexq_bench.regress import Interval, median_interval, ratio_interval


def test_an_exact_denominator_only_scales():
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


def test_interval_of_a_ratio_covers_the_true_ratio_about_as_often_as_it_says():
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
def test_times_that_have_no_ratio_are_refused(low):
    with pytest.raises(ValueError, match="positive finite"):
        ratio_interval(Interval(1.0, low, 1.0), Interval(1.0, 1.0, 1.0))
