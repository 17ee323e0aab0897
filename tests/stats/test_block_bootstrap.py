from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats import block_quantile_intervals, distinct_blocks

SHARES = (0.5, 0.95, 0.99, 1.0)


def test_quantile_is_the_smallest_value_of_its_share():
    values = np.arange(1.0, 101.0).reshape(4, 25)
    found = block_quantile_intervals(values, SHARES)
    assert [interval.estimate for interval in found] == [50, 95, 99, 100]
    assert all(interval.low <= interval.estimate <= interval.high for interval in found)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_ends_have_as_many_values_beyond_as_chance_explains(share):
    values = np.random.default_rng(7).normal(size=(30, 41))
    (found,) = block_quantile_intervals(values, (share,))

    def deviations(end: float, scattering: float) -> float:
        numbers, others = ((values > x).sum(1) for x in (end, scattering))
        return float((numbers.mean() - (1 - share) * 41) / (others.std(ddof=1) / 30**0.5))

    student = 2.0452  # of 29 degrees of freedom
    below = max(values[values < found.low])
    assert deviations(found.low, found.low) >= student
    above = min(values[values > found.low])
    assert deviations(above, above) < student or deviations(above, found.estimate) < student
    assert below < found.low < found.estimate < found.high
    assert deviations(found.high, found.estimate) <= -student or found.high == values.max()


def test_a_quantile_of_few_large_values_seldom_seems_larger():
    """One in a hundred tokens is large, a few segments have most of them: 1 % is the limit."""
    wrong = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        chance = np.where(rng.random((60, 1)) < 0.1, 0.06, 0.004 / 0.9)
        values = (rng.random((60, 100)) < chance) * rng.lognormal(size=(60, 100))
        (interval,) = block_quantile_intervals(values, (0.99,))
        wrong += interval.low > 0
    assert wrong <= 0.025 * 400


def test_different_segments_widen_the_interval():
    rng = np.random.default_rng(0)
    alike = rng.normal(size=(40, 100))
    differing = alike + 3 * rng.normal(size=(40, 1))
    (narrow,), (wide,) = (block_quantile_intervals(values, (0.5,)) for values in (alike, differing))
    assert wide.half_width > 5 * narrow.half_width


def test_intervals_of_dependent_tokens_have_their_coverage():
    """A normal effect of each segment: the median of all is 0."""
    held = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        values = rng.normal(size=(30, 20)) + rng.normal(size=(30, 1))
        (interval,) = block_quantile_intervals(values, (0.5,))
        held += interval.low <= 0 <= interval.high
    assert 0.90 <= held / 100 <= 0.99


def test_maximum_and_single_segment_have_no_interval():
    values = np.random.default_rng(0).normal(size=(20, 5))
    (largest,) = block_quantile_intervals(values, (1.0,))
    assert largest.low == largest.estimate == largest.high == values.max()
    (median,) = block_quantile_intervals(values[:1], (0.5,))
    assert median.low == median.high


def test_repeated_segments_count_once():
    assert list(distinct_blocks([[1, 2], [3, 4], [1, 2], [5, 6], [3, 4]])) == [0, 1, 3]


@pytest.mark.parametrize(
    ("values", "share", "message"),
    [([[]], 0.5, "finite"), ([[np.nan]], 0.5, "finite"), ([[1.0]], 0.0, "above 0")],
)
def test_invalid_input_is_refused(values, share, message):
    with pytest.raises(ValueError, match=message):
        block_quantile_intervals(values, (share,))
