"""Change points of whole series: found, not invented, stable."""

from __future__ import annotations

import numpy as np
import pytest
from flexq_bench.stats.steps import ANY_SERIES, HISTORY_RULES

from flexq_bench.stats.change_points import change_points


def a_series(*levels: tuple[float, int], sigma: float = 0.01, seed: int = 1) -> np.ndarray:
    """Levels, each held for a number of values, with Gaussian noise of relative size sigma."""
    rng = np.random.default_rng(seed)
    values = np.concatenate([np.full(count, level) for level, count in levels])
    return values * np.exp(sigma * rng.standard_normal(values.size))


def test_a_step_is_found_where_it_is_with_its_size():
    values = a_series((100, 40), (105, 40), sigma=0.005)

    (found,) = change_points(values)

    assert found.index == 40
    assert found.mean_before == pytest.approx(values[:40].mean(), rel=0.001)
    assert found.mean_after == pytest.approx(values[40:].mean(), rel=0.001)
    assert found.relative_change == pytest.approx(found.mean_after / found.mean_before - 1)
    assert found.p_value < 0.001


def test_each_of_several_steps_is_found_either_way():
    found = change_points(a_series((100, 30), (106, 40), (98, 30), sigma=0.005))

    assert [point.index for point in found] == [30, 70]
    assert [point.relative_change > 0 for point in found] == [True, False]


def noise(kind: str, rows: int, seed: int) -> np.ndarray:
    """Logs with a standard deviation of 1 %, [rows, 200]."""
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((rows, 200))
    if kind == "t3":
        drawn = rng.standard_t(3, drawn.shape) / np.sqrt(3)
    if kind == "spikes":
        drawn = 0.7 * drawn + 4.1 * (rng.random(drawn.shape) < 0.03)
    if kind == "memory":
        for night in range(1, 200):
            drawn[:, night] = 0.6 * drawn[:, night - 1] + 0.8 * drawn[:, night]
    if kind == "modes":
        switched = np.cumsum(rng.random(drawn.shape) < 0.1, axis=1)
        drawn = 0.98 * np.where(switched % 2, 1, -1) + 0.2 * drawn
    return 0.01 * drawn


@pytest.mark.parametrize(
    ("kind", "most"), [("gaussian", 2), ("t3", 9), ("spikes", 9), ("memory", 9), ("modes", 5)]
)
def test_noise_alone_seldom_has_a_change_point(kind, most):
    false = sum(bool(change_points(100 * np.exp(row))) for row in noise(kind, 200, seed=5))

    assert false <= most  # of 200


@pytest.mark.parametrize("kind", ["gaussian", "t3", "spikes", "memory", "modes"])
def test_a_step_in_noise_is_found_whatever_the_noise(kind):
    rows = noise(kind, 20, seed=6)
    rows[:, 100:] += np.log1p(0.05)

    found = [[p.index for p in change_points(np.exp(row))] for row in rows]

    assert sum(any(abs(at - 100) <= 3 for at in indices) for indices in found) >= 18


def rare_modes(share: float, mode: float, rows: int, seed: int) -> np.ndarray:
    """Logs, [rows, 150]: each night draws anew whether it runs in the mode."""
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((rows, 150))
    return 0.003 * drawn + mode * (rng.random(drawn.shape) < share)


@pytest.mark.parametrize("share", [0.15, 0.2])
@pytest.mark.parametrize("mode", [0.04, -0.04, 0.115])
def test_a_step_is_found_also_where_some_nights_run_in_another_mode(share, mode):
    rows = rare_modes(share, mode, 20, seed=8)
    rows[:, 80:] += np.log1p(0.02)

    found = [[p.index for p in change_points(np.exp(row))] for row in rows]

    assert sum(any(abs(at - 80) <= 3 for at in indices) for indices in found) >= 15


def test_a_step_is_found_in_its_third_night():
    rows = noise("gaussian", 40, seed=12)[:, :100]
    rows[:, 97:] += np.log1p(0.05)

    found = [[p.index for p in change_points(np.exp(row))] for row in rows]

    assert sum(97 in indices for indices in found) >= 35
    assert sum(any(abs(at - 97) <= 3 for at in indices) for indices in found) >= 36


def test_nights_in_another_mode_are_no_change():
    rows = [*rare_modes(0.15, 0.04, 30, seed=9), *rare_modes(0.35, 0.04, 30, seed=9)]

    assert sum(bool(change_points(np.exp(row))) for row in rows) <= 1  # of 60


def near_modes(sigmas: float, rows: int, seed: int) -> np.ndarray:
    """Logs, [rows, 200], σ 1 %: two modes this many σ apart, each for 10 nights on average."""
    rng = np.random.default_rng(seed)
    switched = np.cumsum(rng.random((rows, 200)) < 0.1, axis=1)
    return 0.01 * (rng.standard_normal(switched.shape) + sigmas * (switched % 2))


@pytest.mark.parametrize("rules", [ANY_SERIES, HISTORY_RULES])
@pytest.mark.parametrize("sigmas", [5.0, 6.5])
def test_modes_not_far_above_the_noise_are_no_change_and_hide_none(sigmas, rules):
    rows = near_modes(sigmas, 40, seed=14)
    stepped = rows + np.where(np.arange(200) < 100, 0, np.log1p(0.02))

    false = sum(bool(change_points(np.exp(row), rules)) for row in rows)
    found = [[p.index for p in change_points(np.exp(row), rules)] for row in stepped]

    assert false <= 3  # of 40
    assert sum(any(abs(at - 100) <= 5 for at in indices) for indices in found) >= 20


def test_a_short_series_with_memory_seldom_has_a_change_point():
    rows = noise("memory", 200, seed=11)[:, :40]

    assert sum(bool(change_points(np.exp(row))) for row in rows) <= 6  # of 200


@pytest.mark.parametrize("sigmas", [(0.003, 0.02), (0.02, 0.003)])
def test_a_step_is_found_where_the_noise_changes_with_it(sigmas):
    drawn = np.random.default_rng(3).standard_normal((20, 200))
    rows = drawn * np.repeat(sigmas, 100) + np.repeat([0, np.log1p(0.03)], 100)

    found = [[p.index for p in change_points(np.exp(row))] for row in rows]

    assert sum(any(abs(at - 100) <= 3 for at in indices) for indices in found) >= 14
    assert sum(bool(change_points(np.exp(row))) for row in drawn * np.repeat(sigmas, 100)) <= 2


def test_going_back_and_forth_between_two_levels_is_no_change():
    values = a_series(*[(108, 12), (121, 12)] * 3, sigma=0.002)

    assert change_points(values) == ()


def test_there_and_back_twice_may_be_changes_and_their_repairs():
    values = a_series(*[(108, 30), (121, 30)] * 2, sigma=0.002)

    assert [point.index for point in change_points(values)] == [30, 60, 90]


def test_a_step_of_both_modes_is_the_only_change():
    before, after = [(108, 12), (121, 12)] * 4, [(125, 12), (140, 12)] * 4

    (found,) = change_points(a_series(*before, *after, sigma=0.002))

    assert found.index == 96
    assert found.relative_change == pytest.approx(265 / 229 - 1, abs=0.003)


def test_no_step_before_5_values_none_shorter_than_3_none_below_the_smallest_that_counts():
    small = a_series((100, 40), (100.4, 40), sigma=0.0005)
    assert all(p.index >= 5 for p in change_points(a_series((100, 4), (110, 40), sigma=0.001)))
    assert change_points(a_series((100, 40), (110, 2), sigma=0.001)) == ()
    assert change_points(small, HISTORY_RULES) == ()
    assert [p.index for p in change_points(small)] == [40]
    assert [p.index for p in change_points(a_series((100, 10), (110, 3), sigma=0.001))] == [10]


@pytest.mark.parametrize("spike", [10.0, 300.0])
@pytest.mark.parametrize("at", [0, 50, 98, 99])
def test_a_single_spike_is_no_change_and_moves_none(spike, at):
    values = a_series((100, 60), (105, 40), sigma=0.003)
    values[at] = spike

    found = change_points(values)

    assert [point.index for point in found] == [60]
    assert found[0].relative_change == pytest.approx(0.05, abs=0.003)


def test_appending_neither_moves_nor_loses_an_earlier_step():
    values = a_series((100, 40), (104, 60), (104, 100), seed=8)
    appended = [[p.index for p in change_points(values[:n])] for n in range(60, 200)]

    assert all(indices == appended[0] for indices in appended)
    assert abs(appended[0][0] - 40) <= 1


@pytest.mark.parametrize(
    "values",
    [
        [],
        [100.0],
        [100.0, 200.0],
        [100.0] * 12,
        [100.0] * 200,
        [float("nan")] * 50,
        [0.0] * 50,
        [-1.0] * 50,
        [1e-300, 1e300],
        [float("inf"), 1.0, 2.0],
    ],
)
def test_what_cannot_have_a_change_point_has_none(values):
    assert change_points(values) == ()


def test_a_step_between_two_constants_is_found():
    assert [p.index for p in change_points([100.0] * 20 + [102.0] * 20)] == [20]


def test_gaps_keep_the_index_of_the_series_as_given():
    values = a_series((100, 40), (110, 40), sigma=0.002)
    values[[3, 4, 5, 39, 40, 60]] = [np.nan, 0, -5, np.inf, np.nan, np.nan]

    assert [point.index for point in change_points(values)] == [41]


def test_the_same_series_gives_the_same_answer():
    values = a_series((100, 50), (101.5, 50))

    assert change_points(values) == change_points(values)


def test_a_table_is_refused():
    with pytest.raises(ValueError, match="one dimension"):
        change_points([[1.0, 2.0]])
