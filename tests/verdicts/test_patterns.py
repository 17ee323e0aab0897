"""Classification of made series by pattern."""

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.verdicts import Nights, Pattern, classify


def nights(values: np.ndarray, **beside: np.ndarray) -> Nights:
    given = {"days": np.arange(values.size), "epochs": np.zeros(values.size)} | beside
    return Nights(values, **given)


def quiet(count: int = 60, sigma: float = 0.003, seed: int = 3) -> np.ndarray:
    return 100 * np.exp(sigma * np.random.default_rng(seed).standard_normal(count))


@pytest.mark.parametrize(
    ("factors", "pattern", "index"),
    [
        ([], Pattern.STEADY, None),
        ([(slice(40, None), 1.03)], Pattern.STEP, 40),
        ([(slice(20, None), 1.03), (slice(45, None), 1.03)], Pattern.STEP, 45),
        ([(slice(start, None), 1.03) for start in (15, 30, 45)], Pattern.STEP, 45),
        ([(slice(30, 31), 1.2)], Pattern.SPIKE, 30),
        ([(slice(30, 32), 1.2)], Pattern.SPIKE, 31),
        ([(slice(None), np.exp(np.linspace(0, 0.05, 60)))], Pattern.DRIFT, None),
        ([(slice(None), np.exp(-np.linspace(0, 0.05, 60)))], Pattern.DRIFT, None),
    ],
    ids=["quiet", "step", "two steps", "three steps", "night", "two nights", "rise", "fall"],
)
def test_pattern_follows_the_change_of_the_values(factors, pattern, index):
    values = quiet()
    for place, factor in factors:
        values[place] *= factor

    found = classify(nights(values))

    assert (found.pattern, found.index, found.missing) == (pattern, index, ())


def test_level_that_changes_with_the_device_is_no_step():
    values = quiet()
    values[30:] *= 1.03
    devices = ["one"] * 30 + ["other"] * 30

    found = classify(nights(values, devices=devices))

    assert (found.pattern, found.index) == (Pattern.NEW_DEVICE, 30)
    back = classify(nights(values, devices=["one"] * 40 + ["other"] * 20))
    assert (back.pattern, back.index) == (Pattern.STEP, 30)


def test_step_explained_by_the_clock_is_a_clock_drop():
    values, clocks = quiet(), np.full(60, 1980.0)
    values[40:] *= 1.1
    clocks[40:] /= 1.1

    assert classify(nights(values, clocks_mhz=clocks)).pattern is Pattern.CLOCK_DROP
    assert classify(nights(values, clocks_mhz=np.full(60, 1980.0))).pattern is Pattern.STEP


def test_clock_drop_is_detected_in_its_first_night():
    values, clocks = quiet(), np.full(60, 1980.0)
    values[-1] *= 1.2
    clocks[-1] /= 1.2

    found = classify(nights(values, clocks_mhz=clocks))

    assert (found.pattern, found.index) == (Pattern.CLOCK_DROP, 59)


def test_change_of_driver_is_an_epoch():
    values, epochs = quiet(), np.zeros(60)
    values[40:] *= 1.05
    epochs[40:] = 1

    assert classify(nights(values, epochs=epochs)).pattern is Pattern.STEADY
    fresh = classify(nights(values[:42], epochs=epochs[:42]))
    assert (fresh.pattern, fresh.index) == (Pattern.NEW_EPOCH, 40)


def test_single_night_is_a_new_series():
    assert classify(nights(quiet(1))).pattern is Pattern.NEW_SERIES
    assert classify(nights(quiet(0))).pattern is Pattern.NEW_SERIES


def test_missing_nights_are_listed():
    days = np.concatenate([np.arange(20), np.arange(23, 62), [63]])

    found = classify(nights(quiet(), days=days))

    assert found.pattern is Pattern.STEADY
    assert found.missing == ((20, 22), (62, 62))


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="one entry a night"):
        classify(nights(quiet(), days=np.arange(3)))
