"""Run-to-run noise of a series, and intervals that include it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexq_bench.stats import Interval
from flexq_bench.stats.run_noise import noise_of_changes, run_noise, with_run_noise


def series(rng, sigma, runs=30, step=0.0):
    logs = rng.normal(0, sigma, runs)
    logs[runs // 2 :] += step
    return 10 * np.exp(logs)


def test_the_noise_of_a_long_series_is_found():
    noise = run_noise([series(np.random.default_rng(1), 0.005, runs=400)])

    assert noise.sigma == pytest.approx(0.005, rel=0.15)


@pytest.mark.parametrize("step", [0.05, 0.5])
def test_a_step_is_no_noise(step):
    sigmas = [
        run_noise([series(np.random.default_rng(seed), 0.005, step=step)]).sigma
        for seed in range(40)
    ]

    assert np.median(sigmas) == pytest.approx(0.005, rel=0.3)


def test_difference_of_two_epochs_is_no_noise():
    noise = run_noise([[10.0, 10.01, 10.0, 10.01], [20.0, 20.02, 20.0, 20.02]])

    assert noise.sigma == pytest.approx(0.001 / math.sqrt(2), rel=0.01)


def test_too_few_runs_give_no_noise():
    assert run_noise([[10.0, 11.0, 10.0, 11.0]]) is None
    assert run_noise([]) is None


@pytest.mark.parametrize("runs", [5, 6, 8, 12, 30])
def test_intervals_with_run_noise_have_their_coverage(runs):
    rng = np.random.default_rng(runs)
    hits = np.zeros(2)
    for _ in range(1000):
        times = series(rng, 0.006, runs=runs)
        noise = run_noise([times])
        one = with_run_noise(Interval(*[times[-1]] * 3), noise)
        two = with_run_noise(Interval(*[times[-1] / times[0]] * 3), noise, runs=2)
        hits += [one.low <= 10.0 <= one.high, two.low <= 1.0 <= two.high]

    assert (hits / 1000 > 0.93).all(), hits


def test_autocorrelation_raises_the_noise_estimate():
    noise = noise_of_changes(np.full(20, 0.001), memory=0.75)

    assert noise.sigma == pytest.approx(2 * 0.001 / math.sqrt(2))


def test_non_positive_values_are_refused():
    noise = run_noise([series(np.random.default_rng(0), 0.01)])

    with pytest.raises(ValueError, match="positive"):
        with_run_noise(Interval(1.0, 0.0, 2.0), noise)
    assert with_run_noise(Interval(1.0, 0.0, 2.0), None) == Interval(1.0, 0.0, 2.0)
