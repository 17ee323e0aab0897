"""Kernels that run at one of several speeds, each for several nights: switches are no steps."""

from __future__ import annotations

import numpy as np
import pytest
from flexq_bench.stats.steps import HISTORY_RULES

from flexq_bench.stats.level_model import level_model

SIGMA = 0.01


def speeds(seed: int, levels: tuple[float, ...], size: int = 220, visit: float = 7) -> np.ndarray:
    """ln: noise, and one of these levels, in sigma, that is kept for 7 values on average."""
    rng = np.random.default_rng(seed)
    moved = np.where(rng.random(size) < 1 / visit, rng.integers(1, len(levels), size), 0)
    mode = np.cumsum(moved) % len(levels)
    return SIGMA * (np.array(levels)[mode] + rng.standard_normal(size))


def steps(logs: np.ndarray) -> list[int]:
    return [one.index for one in level_model(20 * np.exp(logs), HISTORY_RULES).steps]


@pytest.mark.parametrize("levels", [(0, 5, 10), (0, 4, 13), (0, 11, 15), (0, 6, 11, 20)])
def test_switches_between_several_speeds_are_no_steps_in_any_night(levels):
    found = [steps(speeds(seed, levels)[:night]) for seed in range(4) for night in (160, 190, 220)]

    assert sum(map(len, found)) <= 1


def test_the_speeds_and_their_switches_are_listed():
    model = level_model(np.exp(speeds(3, (0, 6, 15))), HISTORY_RULES)

    assert model.modes is not None
    assert model.modes.count == 3
    assert model.modes.gap == pytest.approx(np.expm1(0.15), abs=0.01)
    assert len(model.switches) >= 15
    assert model.modes.levels.startswith("3 levels that are up to 16.")


@pytest.mark.parametrize("step", [0.02, 0.07])
def test_a_step_of_all_speeds_is_found(step):
    found = []
    for seed in range(10):
        logs = speeds(seed, (0, 4, 13), size=300)
        logs[150:] += step
        found.append(any(abs(at - 150) <= 5 for at in steps(logs)))

    assert sum(found) >= 7


def test_steps_that_never_return_and_reverted_ones_are_steps_and_no_speeds():
    noise = SIGMA / 3 * np.random.default_rng(1).standard_normal(200)
    once = noise + np.repeat([0, 0.05, 0.11, 0.04, 0.15, 0.09, 0.2, 0.13], 25)
    reverted = noise + 0.06 * np.repeat([0, 1, 0, 1.8, 0, 2.7, 0, 4, 0, 3.3], 20)

    assert steps(once) == pytest.approx(range(25, 200, 25), abs=1)
    assert steps(reverted) == pytest.approx(range(20, 200, 20), abs=1)


def test_two_speeds_with_a_step_of_their_distance_are_not_three():
    found = []
    for seed in range(10):
        logs = speeds(seed, (0, 5), visit=10)
        logs[110:] += 0.05
        found.append(any(abs(at - 110) <= 8 for at in steps(logs)))

    assert sum(found) >= 4


def test_steps_of_two_speeds_do_not_depend_on_the_unit():
    unequal = 0
    for seed in range(24):
        logs = speeds(seed, (0, 8), size=60, visit=5)
        logs[20 + seed :] += 0.04
        in_units = {tuple(steps(logs + np.log(unit))) for unit in (1.0, 1e3, 1 / 60, 2.54)}
        unequal += len(in_units) > 1

    assert unequal <= 1
