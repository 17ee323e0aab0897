"""Change points of a finished history: by all values, and beside a drift of all levels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexq_bench.stats.change_points import change_points
from flexq_bench.stats.hindsight import look_back
from flexq_bench.stats.level_model import level_model

Floats = NDArray[np.float64]


def _noisy(levels: list[tuple[int, float]], sigma: float, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    plain = np.concatenate([np.full(count, level) for count, level in levels])
    noisy: Floats = plain * np.exp(sigma * rng.standard_normal(plain.size))
    return noisy


def _indices(values: Floats, smallest: float | None = None) -> list[int]:
    return [step.index for step in change_points(values, smallest=smallest, in_hindsight=True)]


def test_weak_step_of_long_levels_is_seen_in_hindsight() -> None:
    both = [
        (len(change_points(values)), len(_indices(values)))
        for values in (_noisy([(90, 100.0), (90, 102.0)], 0.014, seed) for seed in range(10))
    ]
    as_commits_came, in_hindsight = np.sum(both, axis=0).tolist()
    assert as_commits_came < 8 < in_hindsight


def test_stated_size_finds_small_steps_beside_large_ones() -> None:
    values = _noisy([(40, 100.0), (40, 200.0), (40, 203.0)], 0.002, 1)
    assert _indices(values) == [40]
    assert _indices(values, 0.01) == [40, 80]
    assert _indices(values, 0.02) == [40]


@pytest.mark.parametrize("step", [-0.03, 0.03])
def test_step_against_a_drift_has_its_own_sign(step: float) -> None:
    time = np.arange(240)
    noise = 0.005 * np.random.default_rng(2).standard_normal(time.size)
    values = 50 * np.exp(0.001 * time + step * (time >= 150) + noise)
    model = level_model(values, in_hindsight=True)
    assert model.drift == pytest.approx(np.expm1(0.239), rel=0.1)
    (found,) = model.steps
    assert abs(found.index - 150) <= 2
    assert found.relative_change == pytest.approx(np.expm1(step), abs=0.006)
    assert found.before == pytest.approx(50 * np.exp(0.15), rel=0.01)


def test_levels_that_mostly_rise_are_no_drift() -> None:
    rng = np.random.default_rng(6)
    parts = [(int(rng.integers(12, 31)), 100 * 1.05 ** (at % 3)) for at in range(19)]
    starts = np.cumsum([count for count, _ in parts])[:-1].tolist()
    model = level_model(_noisy(parts, 0.005, 6), in_hindsight=True)
    assert model.drift == 0
    assert [step.index for step in model.steps] == starts


def test_noise_and_drift_alone_have_no_step() -> None:
    for seed in range(10):
        values = _noisy([(200, 50.0)], 0.02, seed) * np.exp(0.001 * (seed % 2) * np.arange(200))
        assert not _indices(values)


def test_few_switching_series_have_a_step_in_hindsight() -> None:
    slower = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        upper = (np.cumsum(rng.random(60) < 0.1) + rng.integers(2)) % 2
        logs = np.log(1 + 0.15 * upper) + 0.005 * rng.standard_normal(60)
        slower += bool(look_back(logs, 0.01).steps)
    assert slower <= 2


def test_equal_and_few_values_have_no_step_in_hindsight() -> None:
    assert not level_model([1.0] * 50, in_hindsight=True).steps
    assert not level_model([1.0, 2.0, 3.0] * 3, in_hindsight=True).steps
    assert not level_model([0.0] * 40, in_hindsight=True).steps


_LEVELS = st.lists(st.tuples(st.integers(10, 40), st.floats(1.0, 1000.0)), min_size=2, max_size=4)


@given(_LEVELS, st.floats(0.001, 0.05), st.integers(0, 1000))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_scaling_and_sign_hold_in_hindsight(
    levels: list[tuple[int, float]], sigma: float, seed: int
) -> None:
    values = _noisy(levels, sigma, seed)
    model = level_model(values, in_hindsight=True)
    at_start = (1 + model.drift) ** (-np.arange(values.size) / (values.size - 1))
    bounds = [0, *(step.index for step in model.steps), values.size]
    for at, step in enumerate(model.steps, start=1):
        before, after = (
            np.median((values * at_start)[bounds[i] : bounds[i + 1]]) for i in (at - 1, at)
        )
        assert np.sign(step.after - step.before) == np.sign(after - before)
    assert _indices(7.5 * values) == [step.index for step in model.steps]
