"""Trimmed mean and its interval: coverage, outliers, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats.trimmed_mean import trimmed_mean, trimmed_mean_interval


def two_levels(rng, size):
    return 10.0 * (rng.random(size) < 0.5) + rng.normal(0.0, 1.0, size)


@pytest.mark.parametrize(
    "draw", [lambda rng, size: rng.normal(5.0, 3.0, size), two_levels], ids=["normal", "two levels"]
)
@pytest.mark.parametrize("size", [5, 12, 60])
def test_interval_has_its_coverage(draw, size):
    rng = np.random.default_rng(3)
    trials = 600
    intervals = [trimmed_mean_interval(draw(rng, size), trim=0.05) for _ in range(trials)]

    covered = sum(interval.low <= 5.0 <= interval.high for interval in intervals)

    assert 0.91 <= covered / trials <= 0.98


def test_number_of_trimmed_values_is_rounded():
    assert trimmed_mean_interval([1.0, 2.0, 3.0, 10.0], trim=0.05).estimate == 4.0
    twenty = [-1000.0, *range(18), 1000.0]

    interval = trimmed_mean_interval(twenty, trim=0.05)

    assert interval.estimate == trimmed_mean(twenty, trim=0.05) == np.mean(range(18))
    assert interval.half_width < 4.0


def test_interval_without_trim_is_that_of_student():
    # t(0.975, 3 degrees of freedom) = 3.1824, standard deviation 1.2910.
    interval = trimmed_mean_interval([1.0, 2.0, 3.0, 4.0], trim=0.0)

    assert interval.estimate == 2.5
    assert interval.half_width == pytest.approx(3.1824 * 1.2910 / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ([1.0], {}),
        ([1.0, float("nan")], {}),
        ([[1.0, 2.0]], {}),
        ([1.0, 2.0], {"trim": 0.3}),
        ([1.0, 2.0], {"confidence": 1.0}),
    ],
)
def test_bad_input_is_refused(values, options):
    with pytest.raises(ValueError, match=r"two values|one dimension|finite|between"):
        trimmed_mean_interval(values, **{"trim": 0.05, **options})


def test_mean_needs_a_value():
    assert trimmed_mean([3.0], trim=0.05) == 3.0
    with pytest.raises(ValueError, match="a value or more"):
        trimmed_mean([], trim=0.05)
