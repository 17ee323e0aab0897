"""Where a step is placed, and when one is preferred to a drift, in noise with memory."""

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats.level_model import level_model
from flexq_bench.stats.step_likelihood import best_place, step_costs


def with_memory(size: int, seed: int, memory: float = 0.5) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(size)
    for at in range(1, size):
        noise[at] = memory * noise[at - 1] + np.sqrt(1 - memory**2) * noise[at]
    return noise


def test_costs_are_those_of_least_squares_at_each_place():
    values = with_memory(40, 0) + (np.arange(40) >= 25)
    places = np.arange(3, 37)

    costs, information = step_costs(values, places, 0.4)

    for place, cost, logarithm in zip(places, costs, information, strict=True):
        levels = np.stack([np.arange(40) < place, np.arange(40) >= place], axis=1).astype(float)
        design, innovations = levels[1:] - 0.4 * levels[:-1], values[1:] - 0.4 * values[:-1]
        _, [left_over], _, _ = np.linalg.lstsq(design, innovations, rcond=None)
        assert cost == pytest.approx(left_over)
        assert logarithm == pytest.approx(np.linalg.slogdet(design.T @ design)[1])


def test_unclear_place_is_that_near_most_others():
    clear = np.full(30, 50.0)
    clear[22] = 0.0
    unclear = np.full(30, 50.0)
    unclear[[4, 14, 16, 18]] = 0.0, 0.5, 0.5, 0.5

    likely = np.full(30, 50.0)
    likely[[2, 14, 15]] = 0.0, 1.0, 1.1

    assert best_place(clear, np.zeros(30), 1.0) == 22
    assert best_place(unclear, np.zeros(30), 1.0) == 16
    # Of the likeliest of all less than of two neighbours together, of which it is the likelier.
    assert best_place(likely, np.zeros(30), 1.0) == 14


def test_step_in_noise_with_memory_is_placed_near():
    models = []
    for seed in range(40):
        logs = 0.01 * with_memory(200, seed)
        logs[100:] += 0.02
        models.append(level_model(np.exp(logs)))

    near = [any(abs(step.index - 100) <= 5 for step in one.steps) for one in models]
    assert sum(near) >= 32
