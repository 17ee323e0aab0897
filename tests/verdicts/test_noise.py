from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flexq_bench.stats import proportion_interval
from flexq_bench.verdicts import Comparison, noise_levels


def canaries(count, *, block=0.002, placement=0.004, shared=0.0, placements=6, blocks=4, seed=1):
    """Comparisons of a commit with itself; each argument is the sigma of one level."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        labels = np.repeat(np.arange(placements), blocks)
        offsets = rng.normal(0, placement, placements)[labels] + rng.normal(0, shared)
        base = np.full(labels.size, 10.0)
        yield Comparison(base, base * np.exp(offsets + rng.normal(0, block, labels.size)), labels)


def test_noise_of_each_level_is_estimated():
    found = noise_levels(list(canaries(400, shared=0.01)))

    assert found.block == pytest.approx(0.002, rel=0.05)
    assert found.placement == pytest.approx(0.004, rel=0.05)
    assert found.comparison == pytest.approx(0.01, rel=0.1)


def test_unshared_level_has_no_noise():
    found = noise_levels(list(canaries(400)))

    assert found.comparison < 0.001
    assert found.estimate == pytest.approx(0.004 / np.sqrt(6), rel=0.1)


def test_one_percent_of_canaries_exceed_the_floor():
    floor = noise_levels(list(canaries(400, shared=0.03))).noise_floor
    beyond = [
        np.log(c.head_us / c.base_us).mean() > floor for c in canaries(4000, shared=0.03, seed=2)
    ]

    assert np.mean(beyond) == pytest.approx(0.01, abs=0.005)


def test_ninety_percent_of_smallest_steps_exceed_the_floor():
    found = noise_levels(list(canaries(400, shared=0.03)))
    seen = [
        np.log(c.head_us / c.base_us).mean() + found.smallest_step > found.noise_floor
        for c in canaries(4000, shared=0.03, seed=2)
    ]

    assert np.mean(seen) == pytest.approx(0.9, abs=0.03)


def test_bimodal_process_raises_the_floor():
    def between(*modes):
        labels = np.repeat(np.arange(6), 2)
        return [Comparison(np.full(12, 108.0), np.full(12, mode), labels) for mode in modes]

    assert noise_levels(between(108.0, 121.0, 108.0, 121.0, 108.0, 108.0)).noise_floor > 0.12


def test_smallest_step_is_at_least_one_percent():
    assert noise_levels(list(canaries(10, placement=0.0))).smallest_step > np.log1p(0.01)


@pytest.mark.parametrize("count", [1, 4])
def test_few_canaries_give_no_floor(count):
    found = noise_levels(list(canaries(count)))

    assert (found.noise_floor, found.smallest_step) == (None, None)
    assert (found.comparison is None) == (count == 1)


@pytest.mark.parametrize(
    "comparison",
    [
        Comparison([], [], []),
        Comparison([np.nan] * 4, [1.0] * 4, [0, 0, 1, 1]),
        Comparison([1.0] * 4, [1.0] * 4, [0] * 4),
    ],
    ids=["empty", "nan", "one placement"],
)
def test_no_usable_block_gives_no_noise(comparison):
    assert noise_levels([comparison]) is None


def test_single_block_per_placement_has_no_block_noise():
    found = noise_levels(list(canaries(400, blocks=1)))

    assert found.block is None
    assert found.placement == pytest.approx(np.hypot(0.004, 0.002), rel=0.05)


@pytest.mark.parametrize(("hits", "trials"), [(0, 30), (5, 20), (10, 10)])
def test_ends_of_a_proportion_interval_have_tail_probability(hits, trials):
    found = proportion_interval(hits, trials)

    assert found.estimate == hits / trials
    at_most = stats.binom.cdf(hits, trials, found.high)
    at_least = stats.binom.sf(hits - 1, trials, found.low)
    assert found.high == 1 if hits == trials else at_most == pytest.approx(0.025)
    assert found.low == 0 if hits == 0 else at_least == pytest.approx(0.025)


@pytest.mark.parametrize(("hits", "trials"), [(0, 0), (-1, 5), (6, 5)])
def test_proportion_without_trials_is_refused(hits, trials):
    with pytest.raises(ValueError, match="a rate needs"):
        proportion_interval(hits, trials)
