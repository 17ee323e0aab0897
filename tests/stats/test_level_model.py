"""What a series is made of: drifts, two modes and spells are told from steps."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from flexq_bench.stats.clear_steps import EarlierLooks
from flexq_bench.stats.steps import HISTORY_RULES

from flexq_bench.stats import level_model_by_epoch
from flexq_bench.stats.level_model import level_model

SIGMA = 0.003


def noise(size: int, seed: int, sigma: float = SIGMA) -> np.ndarray:
    return sigma * np.random.default_rng(seed).standard_normal(size)


def two_modes(size: int, seed: int, switch: float, gap: float = 0.115) -> np.ndarray:
    """ln: noise, and a mode that changes with this chance from one value to the next."""
    rng = np.random.default_rng(seed)
    upper = np.cumsum(rng.random(size) < switch) % 2
    return noise(size, seed) + gap * upper


def steps(logs: np.ndarray) -> list[int]:
    return [one.index for one in level_model(100 * np.exp(logs)).steps]


def test_a_drift_is_one_drift_with_its_slope_and_onset_and_no_step():
    logs = noise(200, 1) + 0.001 * np.maximum(np.arange(200) - 80, 0)

    model = level_model(np.exp(logs))

    (drift,) = model.drifts
    assert model.steps == ()
    assert abs(drift.onset - 80) <= 10
    assert drift.end == 200
    assert drift.slope == pytest.approx(0.001, rel=0.1)


def test_a_step_in_a_drift_is_found_and_the_drift_is_still_one():
    logs = noise(200, 2) + 0.001 * np.arange(200)
    logs[100:] += 0.03

    model = level_model(np.exp(logs))

    assert [abs(one.index - 100) <= 1 for one in model.steps] == [True]
    assert model.steps[0].relative_change == pytest.approx(0.03, abs=0.005)
    (drift,) = model.drifts
    assert drift.slope == pytest.approx(0.001, rel=0.1)


@pytest.mark.parametrize("switch", [0.1, 0.5])
def test_two_modes_are_no_steps_and_the_step_of_both_is(switch):
    found = []
    for seed in range(10):
        logs = two_modes(200, seed, switch)
        assert steps(logs) == []
        logs[120:] += 0.02
        found.append(any(abs(at - 120) <= 1 for at in steps(logs)))

    assert sum(found) >= 9


def test_switches_of_a_sticky_mode_are_labelled_and_those_of_one_drawn_anew_are_not():
    sticky = level_model(np.exp(two_modes(200, 3, 0.1)))
    drawn = level_model(np.exp(two_modes(200, 3, 0.5)))

    assert sticky.modes is not None
    assert drawn.modes is not None
    assert sticky.modes.gap == pytest.approx(np.expm1(0.115), abs=0.005)
    assert len(sticky.switches) == np.count_nonzero(
        np.diff(np.cumsum(np.random.default_rng(3).random(200) < 0.1) % 2)
    )
    assert drawn.switches == ()


def test_a_change_of_how_often_the_slow_mode_is_drawn_is_a_change():
    rng = np.random.default_rng(4)
    slow = rng.random(200) < np.repeat([0.15, 0.85], 100)

    (found,) = level_model(np.exp(noise(200, 4) + 0.115 * slow)).steps

    assert abs(found.index - 100) <= 5
    assert found.of_share


def visits(*lengths: int, gap: float) -> np.ndarray:
    return gap * np.repeat(np.arange(len(lengths)) % 2, lengths)


def test_visits_of_two_levels_for_weeks_are_levels_of_values_of_any_origin():
    logs = noise(200, 7) + visits(30, 18, 40, 20, 16, 40, 18, 18, gap=0.1)

    assert steps(logs) == [30, 48, 88, 108, 124, 164, 182]
    stored = level_model(np.exp(logs), HISTORY_RULES)
    assert stored.steps == ()
    assert len(stored.switches) == 7


def test_a_step_as_large_as_the_dips_of_a_series_is_a_step():
    logs = noise(300, 8)
    for at in range(10, 290, 20):
        logs[at : at + 1 + at % 3] -= 0.1
    logs[145:] += 0.1

    assert [abs(at - 145) <= 1 for at in steps(logs)] == [True]


def test_the_dips_about_a_step_as_large_as_they_are_stay_switches():
    logs = noise(300, 8)
    for at in range(10, 290, 20):
        logs[at : at + 1 + at % 3] -= 0.1
    logs[145:] += 0.1
    model = level_model(np.exp(logs))

    assert model.modes is not None
    assert len(model.switches) == 2 * len(range(10, 290, 20))


def test_a_level_that_settles_after_a_step_has_one_step():
    settling = 0.1 - 0.04 * np.exp(-np.arange(100) / 6)

    found = steps(noise(200, 9, sigma=0.003) + np.concatenate((np.zeros(100), settling)))

    assert found == [100]


def test_steps_that_are_reverted_one_after_the_other_are_steps_of_a_stored_history():
    logs = noise(260, 10, sigma=0.003)
    for at, jump in ((40, 0.05), (90, 0.11), (150, 0.03), (200, -0.07)):
        logs[at : at + 15] += jump

    found = [one.index for one in level_model(np.exp(logs), HISTORY_RULES).steps]

    assert found == [40, 55, 90, 105, 150, 165, 200, 215]


def test_a_few_slow_values_are_a_spell_once_the_level_is_back():
    logs = noise(80, 5)
    logs[50:53] += 0.05

    running, over = level_model(np.exp(logs[:53])), level_model(np.exp(logs))

    assert [one.index for one in running.steps] == [50]
    assert over.steps == ()
    assert [(one.start, one.stop) for one in over.spells] == [(50, 53)]


@pytest.mark.parametrize("offset", [-5.0, 0.0, 0.5])
def test_values_of_any_sign_have_steps(offset):
    values = np.random.default_rng(6).standard_normal(120) + offset
    values[60:] += 4

    (found,) = level_model(values).steps

    assert abs(found.index - 60) <= 1
    assert found.after - found.before == pytest.approx(4, abs=0.6)


def test_many_outliers_in_a_row_hide_no_step():
    rng = np.random.default_rng(7)
    logs = noise(200, 7)
    logs[rng.random(200) < 0.08] += 0.3
    logs[100:] += 0.02

    assert any(abs(at - 100) <= 1 for at in steps(logs))


def test_memory_makes_no_steps():
    false = 0
    for seed in range(60):
        logs = noise(150, seed, 0.01)
        for night in range(1, 150):
            logs[night] += 0.6 * logs[night - 1]
        false += bool(steps(logs))

    assert false <= 1


def history_steps(logs: np.ndarray) -> list[int]:
    return [one.index for one in level_model(np.exp(logs), HISTORY_RULES).steps]


def test_a_jump_that_fades_is_a_spell_and_never_a_step_of_a_history():
    logs = noise(140, 11)
    logs[100:130] += 0.1 * np.exp(-np.arange(30) / 4)

    nights = [history_steps(logs[:night]) for night in range(103, 141)]

    assert nights == [[]] * len(nights)
    ((start, stop),) = [
        (one.start, one.stop) for one in level_model(np.exp(logs), HISTORY_RULES).spells
    ]
    assert start == 100
    assert 108 <= stop <= 125


def test_two_opposite_steps_six_nights_apart_are_steps():
    logs = noise(140, 12)
    logs[100:106] += 0.05

    assert history_steps(logs[:105]) == [100]
    assert history_steps(logs) == [100, 106]


@pytest.mark.parametrize("depth", [0.015, 0.05])
def test_a_pattern_of_seven_values_hides_no_step_and_is_named(depth):
    logs = noise(150, 13) - depth * (np.arange(150) % 7 >= 5)
    logs[100:] += 0.03

    model = level_model(np.exp(logs[:105]), HISTORY_RULES)

    assert [one.index for one in model.steps] == [100]
    assert model.steps[0].relative_change == pytest.approx(0.03, abs=0.006)
    assert (model.period, model.seasonal) == (7, pytest.approx(depth, abs=0.004))
    assert level_model(np.exp(noise(150, 13)), HISTORY_RULES).period == 0


@pytest.mark.parametrize("period", [4, 12, 24])
def test_steps_of_any_series_are_found_beneath_a_seasonal_component(period):
    place = np.arange(240) % period
    logs = noise(240, 18, 0.02) + 0.12 * np.sin(2 * np.pi * place / period) + 0.1 * (place == 2)
    without_step = level_model(np.exp(logs))
    logs[100:] -= 0.12

    model = level_model(np.exp(logs))

    assert [one.index for one in model.steps] == [100]
    assert without_step.steps == ()
    assert model.period == without_step.period == period
    assert level_model(np.exp(noise(240, 18, 0.02))).period == 0
    # A history of nights may have a weekly component only.
    assert level_model(np.exp(logs), HISTORY_RULES).period == 0


def test_jumps_of_a_sawtooth_are_switches_and_its_ramps_no_drifts():
    logs = noise(300, 19, 0.004) + 0.12 * (1 - np.arange(300) % 30 / 30)

    model = level_model(np.exp(logs))

    assert (model.steps, model.drifts) == ((), ())
    assert [one.index for one in model.switches] == pytest.approx(np.arange(30, 300, 30), abs=2)


def test_a_lasting_step_as_large_as_the_teeth_is_a_step():
    logs = noise(300, 19, 0.004) + 0.12 * (1 - np.arange(300) % 30 / 30)
    logs[165:] += 0.12

    # Which of the two jumps up it was cannot be told: the tooth's at 150 or this one.
    (step,) = level_model(np.exp(logs)).steps
    assert 149 <= step.index <= 166


def test_a_jump_of_a_sawtooth_before_one_that_is_missed_is_a_switch():
    logs = noise(300, 19, 0.004) + 0.12 * (1 - np.arange(300) % 30 / 30)
    # Instead of a jump, the level goes back within 30 values.
    logs[180:210] = logs[180:210][::-1]
    logs[150:180] = np.linspace(logs[150], logs[180], 30)

    assert level_model(np.exp(logs)).steps == ()


def test_a_lasting_step_within_a_sawtooth_is_a_step():
    logs = noise(300, 19, 0.004) + 0.12 * (1 - np.arange(300) % 30 / 30)
    logs[165:] += 0.3

    model = level_model(np.exp(logs))

    assert 165 in [one.index for one in model.steps]
    assert len(model.switches) >= 5


def test_a_plateau_of_a_trend_is_no_jump():
    # Two lines that miss the plateau jump there, but the values next to it do not.
    rng = np.random.default_rng(11)
    wandering = rng.standard_normal(200) * 0.02 * 0.8
    wandering[0] /= 0.8
    for at in range(1, 200):
        wandering[at] += 0.6 * wandering[at - 1]
    time = np.arange(200)
    trend = 0.006 * np.minimum(time, 90) + 0.009 * np.maximum(time - 130, 0)

    assert steps(wandering + trend) == []


def test_a_series_that_keeps_coming_back_to_three_levels_has_switches():
    levels = np.repeat([0, 0.03, 0.08, 0.03, 0, 0.08, 0, 0.03, 0.08], 12)
    logs = noise(levels.size, 14) + levels

    model = level_model(np.exp(logs), HISTORY_RULES)

    assert model.steps == ()
    assert len(model.switches) >= 5


def test_a_hop_that_was_undone_is_no_new_step_of_a_history_when_it_comes_again():
    logs = noise(143, 15)
    logs[34:42] += 0.115
    logs[140:] += 0.115

    assert history_steps(logs) == [34, 42]
    assert steps(logs) == [34, 42, 140]


def test_what_one_look_takes_for_a_step_and_the_look_before_did_not_waits():
    # Student's t of three degrees of freedom: here three values in a row are low by chance.
    rng = np.random.default_rng(zlib.crc32(b"heavy tails (t3) 3"))
    logs = 0.01 * rng.standard_t(3, 220)[:181] / np.sqrt(3)

    assert steps_of_one_look(logs) == [178]
    assert history_steps(logs) == []


def steps_of_one_look(logs: np.ndarray) -> list[int]:
    rules = replace(HISTORY_RULES, earlier_looks=0)
    return [one.index for one in level_model(np.exp(logs), rules).steps]


def test_a_step_that_was_told_stays_told():
    rng = np.random.default_rng(17)
    for _ in range(5):
        logs = 0.01 * rng.standard_normal(130)
        logs[100:] += 0.05
        told = [any(abs(at - 100) <= 2 for at in history_steps(logs[:n])) for n in range(103, 131)]

        assert told == sorted(told)
        assert told[2]


def test_levels_are_compared_within_an_epoch():
    rng = np.random.default_rng(9)
    values = 20 * np.exp(0.003 * rng.standard_normal(90))
    values[30:60] *= 1.05  # with another driver, after which the old one was back
    values[45:60] *= 1.03
    epochs = [1] * 30 + [2] * 30 + [1] * 30

    assert [one.index for one in level_model(values, HISTORY_RULES).steps] == [30, 45, 60]
    assert [one.index for one in level_model_by_epoch(values, epochs, HISTORY_RULES).steps] == [45]
    values[75:] *= 1.03
    found = level_model_by_epoch(values, epochs, HISTORY_RULES).steps
    assert [one.index for one in found] == [45, 75]
    with pytest.raises(ValueError, match="one epoch per value is needed, got 1 for 90"):
        level_model_by_epoch(values, [1])


def test_a_step_of_a_long_history_is_confirmed_by_looks_at_some_of_its_nights():
    asked: list[int] = []

    def steps_without(newest: int) -> tuple[int, ...]:
        asked.append(newest)
        return (100,)

    looks = EarlierLooks(steps_without, most=5)

    # such memory asks for the step in every look since it was new
    assert looks.confirms(100, 1900, 1e-3, 0.5, beside_a_line=False, after_spells=False)
    assert len(asked) <= 50
    assert min(asked) == 1
    assert max(asked) > 1800
