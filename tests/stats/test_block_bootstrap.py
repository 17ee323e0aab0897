from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats import block_quantile_intervals, distinct_blocks
from flexq_bench.stats.block_bootstrap import few_blocks_factor

SHARES = (0.5, 0.95, 0.99, 1.0)


def test_quantile_is_the_smallest_value_of_its_share():
    values = np.arange(1.0, 101.0).reshape(4, 25)
    found = block_quantile_intervals(values, SHARES, seed=0)
    assert [interval.estimate for interval in found] == [50, 95, 99, 100]
    assert all(interval.low <= interval.estimate <= interval.high for interval in found)


@pytest.mark.parametrize("shape", [(5, 1), (6, 7), (30, 41)])
def test_interval_is_that_of_sorted_resamples(shape):
    values = np.random.default_rng(7).normal(size=shape)
    rng, count = np.random.default_rng(2), shape[0]
    drawn = []
    for _ in range(1000):
        times = rng.multinomial(count, np.full(count, 1 / count))
        resample = np.sort(np.repeat(values, times, axis=0), axis=None)
        drawn.append(resample[int(np.ceil(0.9 * resample.size)) - 1])
    low, high = np.quantile(drawn, (0.025, 0.975))
    (found,) = block_quantile_intervals(values, (0.9,), seed=2)
    ratio = (found.high - found.low) / (high - low)
    beyond = values.size - int(np.ceil(0.9 * values.size)) + 1
    assert ratio == pytest.approx(few_blocks_factor(max(2, min(count, beyond))))


def test_different_segments_widen_the_interval():
    rng = np.random.default_rng(0)
    alike = rng.normal(size=(40, 100))
    differing = alike + 3 * rng.normal(size=(40, 1))
    (narrow,), (wide,) = (
        block_quantile_intervals(values, (0.5,), seed=1) for values in (alike, differing)
    )
    assert wide.half_width > 5 * narrow.half_width


def test_intervals_of_dependent_tokens_have_their_coverage():
    """A normal effect of each segment: the median of all is 0."""
    held = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        values = rng.normal(size=(30, 20)) + rng.normal(size=(30, 1))
        (interval,) = block_quantile_intervals(values, (0.5,), seed=seed)
        held += interval.low <= 0 <= interval.high
    assert 0.90 <= held / 100 <= 0.99


def test_maximum_and_single_segment_have_no_interval():
    values = np.random.default_rng(0).normal(size=(20, 5))
    (largest,) = block_quantile_intervals(values, (1.0,), seed=0)
    assert largest.low == largest.estimate == largest.high == values.max()
    (median,) = block_quantile_intervals(values[:1], (0.5,), seed=0)
    assert median.low == median.high


def test_repeated_segments_count_once():
    assert list(distinct_blocks([[1, 2], [3, 4], [1, 2], [5, 6], [3, 4]])) == [0, 1, 3]


@pytest.mark.parametrize(
    ("values", "share", "message"),
    [([[]], 0.5, "finite"), ([[np.nan]], 0.5, "finite"), ([[1.0]], 0.0, "above 0")],
)
def test_invalid_input_is_refused(values, share, message):
    with pytest.raises(ValueError, match=message):
        block_quantile_intervals(values, (share,), seed=0)
