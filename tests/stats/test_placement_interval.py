"""The interval over placements: exact where it should be, and valid where placements are added."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flexq_bench.stats import (
    hierarchical_interval,
    placement_interval,
    samples_explain_spread,
    signed_rank_interval,
)


@pytest.mark.parametrize("n", [6, 8, 13])
def test_the_ends_are_where_the_signed_rank_test_begins_to_reject(n):
    values = np.random.default_rng(n).normal(10, 1, n)

    interval = signed_rank_interval(values)

    def p_value(centre):
        return stats.wilcoxon(values - centre, method="exact").pvalue

    width = interval.high - interval.low
    assert p_value(interval.low + 1e-6 * width) > 0.05 >= p_value(interval.low - 1e-6 * width)
    assert p_value(interval.high - 1e-6 * width) > 0.05 >= p_value(interval.high + 1e-6 * width)
    assert interval.low < interval.estimate < interval.high


def test_few_values_give_their_range_and_no_value_is_refused():
    assert signed_rank_interval([3.0, 1.0, 2.0]).low == 1.0
    assert signed_rank_interval([3.0, 1.0, 2.0]).high == 3.0
    with pytest.raises(ValueError, match="at least one value"):
        signed_rank_interval([])


def placements(rng, count, between, within, samples=30):
    return [rng.normal(100 + rng.normal(0, between), within, samples) for _ in range(count)]


def test_samples_that_scatter_more_than_placements_explain_their_spread():
    rng = np.random.default_rng(2)

    assert samples_explain_spread(placements(rng, 8, between=0.02, within=1.0))
    assert not samples_explain_spread(placements(rng, 8, between=1.0, within=0.2))
    assert not samples_explain_spread([[1.0], [1.1], [0.9]])


def test_placements_with_speeds_of_their_own_keep_the_interval_of_their_median():
    found = placements(np.random.default_rng(3), 8, between=1.0, within=0.2)

    assert placement_interval(found, seed=5) == hierarchical_interval(found, seed=5)


def test_the_interval_covers_the_truth_though_placements_are_added_until_it_is_narrow():
    rng = np.random.default_rng(4)
    trials, covered, taken = 200, 0, 0
    for _ in range(trials):
        found = placements(rng, 5, between=0.1, within=1.2)
        while not (interval := placement_interval(found, seed=1)).is_within(0.0025):
            found += placements(rng, 1, between=0.1, within=1.2)
        covered += interval.low <= 100 <= interval.high
        taken += len(found)

    assert covered / trials >= 0.92
    assert taken / trials < 12
