"""Bootstrap intervals: coverage, the effect of placement, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats import Interval, hierarchical_interval, median_interval


@pytest.mark.parametrize("size", [25, 50])
def test_median_interval_has_its_coverage(size):
    rng = np.random.default_rng(7)
    trials = 400
    covered = 0
    for trial in range(trials):
        interval = median_interval(rng.lognormal(mean=0.0, sigma=0.4, size=size), seed=trial)
        covered += interval.low <= 1.0 <= interval.high  # the median of this lognormal is 1

    assert 0.91 <= covered / trials <= 0.985


def test_interval_equals_plain_resampling_for_even_and_odd_sizes():
    rng = np.random.default_rng(3)
    for size in (20, 21):
        samples = rng.normal(100.0, 5.0, size)
        resampled = np.median(rng.choice(samples, (20_000, size)), axis=1)
        expected = np.quantile(resampled, (0.025, 0.975))

        interval = median_interval(samples, seed=1)

        assert interval.low == pytest.approx(expected[0], abs=0.8)
        assert interval.high == pytest.approx(expected[1], abs=0.8)


@pytest.mark.parametrize("samples", [[0.0, 10.0], [0.0, 5.0, 10.0]])
def test_median_of_a_resample_uses_the_middle_values(samples):
    # Resamples have median 0 with probability 1/4 or 7/27, 10 as often, and 5 otherwise.
    interval = median_interval(samples, seed=1, confidence=0.4)

    assert interval == Interval(5.0, 5.0, 5.0)


def test_different_placements_widen_the_interval():
    rng = np.random.default_rng(5)
    placements = [centre + rng.normal(0.0, 0.05, 100) for centre in (108, 109, 110, 121, 122)]

    by_placement = hierarchical_interval(placements, seed=1)
    pooled = median_interval(np.concatenate(placements), seed=1)

    assert by_placement.high - by_placement.low > 3 * (pooled.high - pooled.low)
    assert by_placement.low < 109
    assert by_placement.high > 121


def test_hierarchical_interval_covers_the_median_over_placements():
    rng = np.random.default_rng(11)
    trials = 300
    covered = 0
    for trial in range(trials):
        placements = [rng.normal(rng.normal(100, 1), 0.2, 30) for _ in range(12)]
        interval = hierarchical_interval(placements, seed=trial)
        covered += interval.low <= 100 <= interval.high

    assert 0.89 <= covered / trials <= 0.995


def test_estimate_is_the_median_of_placement_medians():
    interval = hierarchical_interval([[1.0] * 50, [2.0, 2.0], [9.0]], seed=0)

    assert interval.estimate == 2.0


def test_interval_depends_on_the_seed():
    samples = np.random.default_rng(0).normal(10, 1, 40)

    assert median_interval(samples, seed=4) == median_interval(samples, seed=4)
    assert median_interval(samples, seed=4) != median_interval(samples, seed=5)


def test_higher_confidence_is_wider():
    samples = np.random.default_rng(0).normal(10, 1, 40)

    narrow = median_interval(samples, seed=4, confidence=0.5)
    wide = median_interval(samples, seed=4, confidence=0.99)

    assert wide.low < narrow.low < narrow.high < wide.high


def test_one_sample_is_its_own_interval():
    assert median_interval([3.5], seed=0) == Interval(3.5, 3.5, 3.5)


def test_tolerance_applies_to_the_wider_side():
    interval = Interval(100.0, 99.9, 100.3)

    assert interval.is_within(0.003)
    assert not interval.is_within(0.0029)


@pytest.mark.parametrize(
    ("placements", "confidence", "message"),
    [
        ([], 0.95, "at least one placement"),
        ([[1.0], []], 0.95, "at least one sample"),
        ([[1.0, float("nan")]], 0.95, "finite"),
        ([[1.0]], 1.0, "confidence"),
    ],
)
def test_input_without_an_interval_is_refused(placements, confidence, message):
    with pytest.raises(ValueError, match=message):
        hierarchical_interval(placements, seed=0, confidence=confidence)
