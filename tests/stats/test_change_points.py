"""Change points: rows of histories that went wrong, and rules that hold for any series."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexq_bench.stats.change_points import change_points
from flexq_bench.stats.follower import Follower
from flexq_bench.stats.level_model import level_model
from flexq_bench.stats.log_series import SMALLEST_LOG_RATIO

Floats = NDArray[np.float64]


def _noisy(levels: list[tuple[int, float]], sigma: float, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    plain = np.concatenate([np.full(count, level) for count, level in levels])
    noisy: Floats = plain * np.exp(sigma * rng.standard_normal(plain.size))
    return noisy


def _indices(values: Floats) -> list[int]:
    return [step.index for step in change_points(values)]


@pytest.mark.parametrize("seed", range(15))
def test_single_outliers_before_a_step_leave_its_sign(seed: int) -> None:
    values = _noisy([(100, 100.0), (20, 170.0)], 0.02, seed)
    values[np.random.default_rng(seed).choice(np.arange(20, 95), 5, replace=False)] *= 2
    (step,) = change_points(values)
    assert abs(step.index - 100) <= 1
    assert 0.6 < step.relative_change < 0.8


def test_outliers_next_to_a_step_leave_its_sign() -> None:
    for seed in range(20):
        values = _noisy([(40, 100.0), (40, 110.0)], 0.01, seed)
        start, count = 40 - seed % 4, 1 + seed % 3
        values[start : start + count] *= 2.0 if seed % 2 else 0.5
        assert change_points(values)[-1].relative_change > 0


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_step_of_two_speeds_is_seldom_faster_anywhere(share: float) -> None:
    wrong = 0
    for seed in range(10):
        values = _noisy([(100, 100.0), (40, 103.0)], 0.005, seed)
        values *= 1 + 0.05 * (np.random.default_rng(100 + seed).random(140) < share)
        steps = [step for step in change_points(values) if abs(step.relative_change) >= 0.01]
        assert steps[-1].relative_change > 0
        wrong += any(step.relative_change < 0 for step in steps)
    assert wrong <= 1  # eight slow nights in a row look like a level


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("size", [30, 60])
def test_odd_first_values_hide_no_step(first: int, size: int) -> None:
    for seed in range(12):
        values = _noisy([(size // 2, 100.0), (size - size // 2, 110.0)], 0.01, 100 * seed + first)
        values[:first] *= 1.5
        assert any(abs(index - size // 2) <= 2 for index in _indices(values))


def test_two_speeds_at_random_are_seldom_a_step() -> None:
    onsets = 0
    for seed in range(10):
        slow = np.random.default_rng(300 + seed).random(120) < 0.3
        onsets += len(_indices(_noisy([(120, 100.0)], 0.005, seed) * (1 + 0.05 * slow)))
    assert onsets <= 2


def test_steps_back_and_forth_every_twenty_values_are_found() -> None:
    values = _noisy([(20, 100.0), (20, 110.0)] * 2 + [(30, 100.0)], 0.01, 8)
    assert _indices(values) == [20, 40, 60, 80]


def test_change_counts_after_a_much_larger_one() -> None:
    values = _noisy([(30, 1500.0), (30, 100.0), (20, 115.0)], 0.01, 9)
    assert _indices(values) == [30, 60]


@pytest.mark.parametrize("levels", [2, 3])
def test_long_visits_to_levels_are_steps(levels: int) -> None:
    rng = np.random.default_rng(3)
    parts = [(int(rng.integers(12, 31)), 100 * 1.05 ** (at % levels)) for at in range(19)]
    starts = np.cumsum([count for count, _ in parts])[:-1].tolist()
    found = _indices(_noisy(parts, 0.005, 4))
    near = [any(abs(index - start) <= 2 for index in found) for start in starts]
    assert sum(near) >= 17


def test_large_step_stays_at_every_look() -> None:
    values = _noisy([(60, 100.0), (40, 55.0)], 0.03, 5)
    looks = [_indices(values[:seen]) for seen in range(63, 101)]
    assert all(look == looks[0] for look in looks)
    assert abs(looks[0][0] - 60) <= 1


@pytest.mark.parametrize("chance", [0.1, 0.2])
def test_series_that_switches_often_is_slower_at_few_looks(chance: float) -> None:
    slower = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        upper = (np.cumsum(rng.random(60) < chance) + rng.integers(2)) % 2
        follower = Follower(
            np.log(100 * (1 + 0.15 * upper)) + 0.005 * rng.standard_normal(60), SMALLEST_LOG_RATIO
        )
        reported = []
        for seen in range(8, 61):
            follower.see(seen)
            reported += [level.effect for level in follower.levels if level.is_reported]
        slower += any(effect > 0 for effect in reported)
    assert slower <= 2  # of 40: docs/statistics.md has the rates and their price


def test_noise_alone_has_no_step() -> None:
    assert not any(_indices(_noisy([(200, 50.0)], 0.02, seed)) for seed in range(20))


def test_drift_of_one_per_mille_is_no_step() -> None:
    rng = np.random.default_rng(1)
    values = 100 * np.exp(0.001 * np.arange(200) + 0.01 * rng.standard_normal(200))
    assert len(_indices(values)) <= 1


def test_three_slow_values_and_back_are_a_spell() -> None:
    values = _noisy([(40, 100.0), (3, 120.0), (17, 100.0)], 0.005, 6)
    assert _indices(values[:43]) == [40]
    model = level_model(values)
    assert not model.steps
    assert [(spell.start, spell.stop) for spell in model.spells] == [(40, 43)]


def test_early_step_waits_until_its_levels_lasted() -> None:
    values = _noisy([(12, 100.0), (40, 115.0)], 0.005, 7)
    young = level_model(values[:16])
    assert not young.steps
    assert young.waiting is not None
    assert young.waiting.index == 12
    assert _indices(values) == [12]


def test_small_move_after_a_step_is_part_of_it() -> None:
    values = _noisy([(40, 100.0), (15, 125.0), (60, 122.5)], 0.002, 7)
    assert _indices(values) == [40]
    values = _noisy([(40, 100.0), (40, 125.0), (40, 122.5)], 0.002, 7)
    assert _indices(values) == [40]
    values = _noisy([(40, 100.0), (40, 125.0), (40, 120.0)], 0.002, 7)
    assert _indices(values) == [40, 80]


def test_step_on_a_drift_is_found() -> None:
    rng = np.random.default_rng(1)
    steps = 0.001 * np.arange(200) + 0.06 * (np.arange(200) >= 100)
    assert _indices(100 * np.exp(steps + 0.003 * rng.standard_normal(200))) == [100]


def test_return_after_a_short_visit_is_reported_later() -> None:
    values = _noisy([(30, 100.0), (10, 110.0), (90, 100.0)], 0.005, 7)
    assert _indices(values[:60]) == [30]
    assert _indices(values) == [30, 40]


def test_series_needs_one_dimension_and_a_device_per_value() -> None:
    with pytest.raises(ValueError, match="one dimension"):
        change_points([[1.0, 2.0]])
    with pytest.raises(ValueError, match="one device per value"):
        change_points([1.0, 2.0], devices=[0])


_LEVELS = st.lists(st.tuples(st.integers(10, 40), st.floats(1.0, 1000.0)), min_size=2, max_size=4)
_SERIES = st.tuples(_LEVELS, st.floats(0.001, 0.05), st.integers(0, 1000)).map(
    lambda drawn: _noisy(*drawn)
)


@given(_SERIES)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_sign_agrees_with_medians_between_neighbours(values: Floats) -> None:
    steps = change_points(values)
    bounds = [0, *(step.index for step in steps), values.size]
    for at, step in enumerate(steps, start=1):
        before = np.median(values[bounds[at - 1] : bounds[at]])
        after = np.median(values[bounds[at] : bounds[at + 1]])
        assert np.sign(step.after - step.before) == np.sign(after - before)


@given(_SERIES)
@settings(max_examples=4, deadline=None, derandomize=True)
def test_certain_step_stays_while_its_level_stands(values: Floats) -> None:
    reported: dict[int, tuple[float, float]] = {}
    for seen in range(8, values.size + 1):
        steps = change_points(values[:seen])
        newest = float(np.median(values[seen - 5 : seen]))
        for index, (before, after) in reported.items():
            if abs(newest - after) < abs(newest - before):
                assert any(abs(step.index - index) <= 5 for step in steps)
        reported = {step.index: (step.before, step.after) for step in steps if step.p_value < 1e-10}


@given(_SERIES, st.floats(0.01, 100.0))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_scaling_changes_no_step(values: Floats, factor: float) -> None:
    assert _indices(values * factor) == _indices(values)


@given(st.lists(st.floats(10.0, 1000.0), min_size=1, max_size=8), st.integers(0, 100))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_values_put_before_a_series_lose_no_step(prefix: list[float], seed: int) -> None:
    values = _noisy([(30, 100.0), (30, 115.0)], 0.01, seed)
    longer = np.concatenate((prefix, values))
    assert any(abs(index - len(prefix) - 30) <= 3 for index in _indices(longer))


def test_three_values_near_the_later_level_lose_no_step() -> None:
    values = np.concatenate(([112.0] * 3, _noisy([(30, 100.0), (30, 115.0)], 0.01, 0)))
    assert any(abs(index - 33) <= 3 for index in _indices(values))


def test_six_values_on_the_later_level_lose_no_step() -> None:
    values = _noisy([(6, 115.0), (30, 100.0), (30, 115.0)], 0.005, 3)
    assert 36 in _indices(values)
