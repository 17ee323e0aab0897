"""Triggers: comparison of a result with its history, and with the last release."""

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.verdicts import Verdict, creep, trigger
from flexq_bench.verdicts.history_trigger import are_candidates


def quiet(nights: int = 30, sigma: float = 0.002, seed: int = 2) -> np.ndarray:
    return 100 * np.exp(sigma * np.random.default_rng(seed).standard_normal(nights))


@pytest.mark.parametrize("latest", [102.0, 98.0])
def test_change_of_2_percent_is_a_candidate(latest):
    found = trigger(quiet(), latest)

    assert found.verdict is Verdict.CANDIDATE
    assert found.log_change == pytest.approx(np.log(latest / 100), abs=0.002)
    assert (found.z > 0) == (latest > 100)


def test_scale_is_robust_and_has_a_floor():
    assert trigger([100.0] * 30, 100.3).scale == pytest.approx(0.002)
    assert trigger([100.0] * 30, 100.3).verdict is Verdict.SAME
    assert trigger([100.0] * 30, 100.6).verdict is Verdict.CANDIDATE
    noisy = quiet(sigma=0.01)
    noisy[5] = 500.0
    assert trigger(noisy, 100.0).scale == pytest.approx(0.01, rel=0.5)


def test_only_the_last_30_results_count():
    history = np.concatenate([np.full(100, 50.0), quiet(30)])

    found = trigger(history, 100.0)

    assert found.verdict is Verdict.SAME
    assert found.history == 30


def test_noise_does_not_hide_2_percent():
    assert trigger(quiet(sigma=0.05), 100 * np.exp(0.08)).verdict is Verdict.CANDIDATE


def test_step_to_the_other_mode_is_a_candidate():
    history = [121.0] * 20 + [108.0] * 10

    assert trigger(history, 121.0).verdict is Verdict.CANDIDATE


def test_result_like_one_found_unchanged_is_no_candidate():
    history = quiet(sigma=0.01)

    assert trigger(history, 103.0).verdict is Verdict.CANDIDATE
    assert trigger(history, 103.0, unchanged=[103.2]).verdict is Verdict.SAME
    assert trigger(history, 97.0, unchanged=[103.2]).verdict is Verdict.CANDIDATE
    assert trigger(history, 107.0, unchanged=[103.2]).verdict is Verdict.CANDIDATE


@pytest.mark.parametrize("sigma", [0.003, 0.01, 0.03])
def test_trigger_learns_the_noise_of_a_series_without_changes(sigma):
    rng = np.random.default_rng(5)
    candidates = 0
    for _ in range(50):
        nights = 100 * np.exp(sigma * rng.standard_normal(30))
        unchanged: list[float] = []
        for night in range(1, 30):
            found = trigger(nights[:night], nights[night], unchanged=unchanged)
            if found.verdict is Verdict.CANDIDATE:
                unchanged.append(nights[night])
                candidates += night >= 10

    assert candidates <= 0.05 * 50 * 20


@pytest.mark.parametrize(
    ("history", "latest"),
    [([], 1.0), ([0.0], 100.0), ([float("nan")] * 30, 1.0), ([100.0] * 30, float("nan"))],
)
def test_no_history_or_no_result_is_no_data(history, latest):
    assert trigger(history, latest).verdict is Verdict.NO_DATA


@pytest.mark.parametrize("nights", [1, 2, 3, 4])
def test_few_results_give_a_change_without_sigma(nights):
    history = [100.0, 100.1, 99.9, 100.2][:nights]

    assert trigger(history, 102.0).verdict is Verdict.CANDIDATE
    assert trigger(history, 98.0).verdict is Verdict.CANDIDATE
    assert trigger(history, 101.0).verdict is Verdict.SAME


def test_small_steps_since_the_release_are_detected():
    steps = np.concatenate([np.full(5, 1.004**step) for step in range(13)])
    history = quiet(steps.size) * steps

    found = creep(history[:5], history[5:])

    assert found.verdict is Verdict.CANDIDATE
    assert found.log_change == pytest.approx(12 * np.log(1.004), abs=0.005)


def test_constant_level_is_no_creep():
    history = quiet(60)

    assert creep(history[:5], history[5:]).verdict is Verdict.SAME
    assert creep(history[:2], history[5:]).verdict is Verdict.NO_DATA


def test_many_series_are_judged_as_each_alone():
    rng = np.random.default_rng(5)
    series = [
        (quiet(nights, seed=nights), 100 * np.exp(change), noise)
        for nights in (0, 1, 4, 5, 30, 31, 60)
        for change in (0.0, 0.004, -0.01, 0.03)
        for noise in ([], [100.5], [99.0, 101.0])
    ]
    series.append((quiet(), float("nan"), []))
    series.append((100 * np.exp(0.01 * rng.standard_normal(20)), 104.0, [103.9]))

    alone = [
        trigger(history, latest, unchanged=unchanged).verdict is Verdict.CANDIDATE
        for history, latest, unchanged in series
    ]

    assert are_candidates(series) == alone
    assert {True, False} == set(alone)
