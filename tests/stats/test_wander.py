"""Levels that wander by themselves: their steps are none, and clear ones among them still are."""

from __future__ import annotations

import numpy as np
import pytest
from flexq_bench.stats.steps import ANY_SERIES, HISTORY_RULES

from flexq_bench.stats.level_model import level_model

SIGMA = 0.01


def wandering(seed: int, size: int = 800, slow: float = 0.7) -> np.ndarray:
    """ln: white noise, and AR(1) 0.96 with this many times its standard deviation."""
    rng = np.random.default_rng(seed)
    level = rng.standard_normal(size)
    for at in range(1, size):
        level[at] = 0.96 * level[at - 1] + np.sqrt(1 - 0.96**2) * level[at]
    return SIGMA * (rng.standard_normal(size) + slow * level)


def steps(logs: np.ndarray, rules=ANY_SERIES) -> list[int]:
    return [one.index for one in level_model(100 * np.exp(logs), rules).steps]


@pytest.mark.parametrize("rules", [ANY_SERIES, HISTORY_RULES])
def test_a_level_that_wanders_everywhere_makes_hardly_a_step(rules):
    assert sum(len(steps(wandering(seed), rules)) for seed in range(10)) <= 5


def test_a_clear_step_of_a_level_that_wanders_is_found():
    found = []
    for seed in range(10):
        logs = wandering(seed)
        logs[400:] += 5 * SIGMA
        found.append(any(abs(at - 400) <= 3 for at in steps(logs)))

    assert sum(found) >= 9


def test_small_steps_of_levels_that_hold_are_not_taken_for_wandering():
    logs = SIGMA * np.random.default_rng(4).standard_normal(800)
    for at, size in ((150, 1.5), (300, -1.5), (620, 1.5)):
        logs[at:] += size * SIGMA

    assert steps(logs) == pytest.approx([150, 300, 620], abs=5)


def test_a_change_over_a_few_values_of_a_short_series_is_no_drift():
    for seed in range(5):
        logs = 0.01 * np.random.default_rng(seed).standard_normal(50)
        logs += 0.2 * np.clip((np.arange(50) - 20) / 8, 0, 1)

        assert any(abs(at - 24) <= 5 for at in steps(logs))


def test_a_level_that_wanders_for_a_while_makes_few_steps_and_a_step_among_them_is_one():
    found, clear = [], 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        walk = np.zeros(600)
        walk[100:180] = 0.25 * rng.standard_normal(80)
        logs = SIGMA * (rng.standard_normal(600) + np.cumsum(walk))
        logs[400:] += 2.5 * SIGMA
        found.append([at for at in steps(logs) if at < 250])
        clear += any(abs(at - 400) <= 5 for at in steps(logs))

    assert sum(map(len, found)) <= 17
    assert clear >= 29
