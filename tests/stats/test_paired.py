from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flexq_bench.stats import is_clear, item_difference, mean_difference_interval


def test_common_difficulty_cancels():
    rng = np.random.default_rng(0)
    base = rng.normal(3.0, 1.0, 40)
    head = base + 0.01 + rng.normal(0, 0.005, 40)
    found = mean_difference_interval(base, head, seed=0)
    assert is_clear(found)
    assert found.low < 0.01 < found.high
    # Not paired, nothing would be clear.
    assert not is_clear(mean_difference_interval(base, rng.permutation(head), seed=0))


def test_difference_within_its_interval_is_not_clear():
    rng = np.random.default_rng(1)
    base = rng.normal(size=30)
    assert not is_clear(mean_difference_interval(base, base + rng.normal(size=30), seed=0))


@pytest.mark.parametrize("count", [4, 8, 40])
def test_interval_has_its_coverage(count):
    rng = np.random.default_rng(2)
    trials = 250
    hits = 0
    for trial in range(trials):
        differences = rng.normal(0.3, 1.0, count)
        found = mean_difference_interval(np.zeros(count), differences, seed=trial)
        hits += found.low <= 0.3 <= found.high
    assert hits / trials == pytest.approx(0.95, abs=0.03)


def test_without_scatter_the_interval_is_a_point():
    found = mean_difference_interval([1.0, 2.0, 3.0], [1.5, 2.5, 3.5], seed=0)
    assert (found.low, found.estimate, found.high) == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("base", "head", "message"),
    [
        ([1.0, 2.0], [1.0], "two equal rows"),
        ([1.0], [1.0], "at least 2"),
        ([1.0, np.nan], [1.0, 2.0], "must be finite"),
    ],
)
def test_unpaired_values_are_refused(base, head, message):
    with pytest.raises(ValueError, match=message):
        mean_difference_interval(base, head, seed=0)


def test_only_discordant_questions_decide():
    base = [True] * 50 + [True] * 12 + [False] * 2 + [False] * 36
    head = [True] * 50 + [False] * 12 + [True] * 2 + [False] * 36
    found = item_difference(base, head)
    assert (found.only_base, found.only_head) == (12, 2)
    assert found.interval.estimate == pytest.approx(-0.10)
    assert found.p_value == pytest.approx(2 * stats.binom.cdf(2, 14, 0.5))
    assert is_clear(found.interval)


def test_equal_answers_have_a_nonzero_interval():
    found = item_difference([True, False] * 10, [True, False] * 10)
    assert found.interval.estimate == 0
    assert found.p_value == 1
    assert found.interval.low < 0 < found.interval.high


def test_interval_of_answers_has_its_coverage():
    rng = np.random.default_rng(3)
    trials = 400
    hits = 0
    for _ in range(trials):
        kind = rng.choice(4, size=100, p=[0.5, 0.12, 0.06, 0.32])
        found = item_difference((kind == 0) | (kind == 1), (kind == 0) | (kind == 2)).interval
        hits += found.low <= -0.06 <= found.high
    assert hits / trials == pytest.approx(0.95, abs=0.03)


def test_no_answers_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        item_difference([], [])
