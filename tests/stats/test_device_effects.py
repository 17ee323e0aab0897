"""A change of level that comes with another device is not a change point, unless that is known."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from flexq_bench.stats.change_points import change_points
from flexq_bench.stats.level_model import level_model, on_newest_device

EFFECTS = np.array([0.0, 0.008, -0.008, 0.02])


def measured(devices, seed, sigma=0.003):
    """ln: noise, and what each device adds."""
    rng = np.random.default_rng(zlib.crc32(f"devices {seed}".encode()))
    return sigma * rng.standard_normal(len(devices)) + EFFECTS[np.asarray(devices)]


def visits(size, seed, stay=0.9):
    """One of four devices; with this chance the same one as before."""
    rng = np.random.default_rng(zlib.crc32(f"visits {seed}".encode()))
    device = rng.integers(4, size=size)
    for at in range(1, size):
        if rng.random() < stay:
            device[at] = device[at - 1]
    return device.tolist()


def found(logs, devices=None):
    return [one.index for one in change_points(20 * np.exp(logs), devices)]


@pytest.mark.parametrize("stay", [0.0, 0.9])
def test_changes_of_device_are_no_change_points(stay):
    series = [(visits(150, seed, stay), seed) for seed in range(10)]

    assert [found(measured(devices, seed), devices) for devices, seed in series] == [[]] * 10


def test_without_devices_they_would_be():
    series = [(visits(150, seed), seed) for seed in range(4)]

    assert any(found(measured(devices, seed)) for devices, seed in series)


def test_a_step_between_changes_of_device_is_found():
    places = []
    for seed in range(6):
        devices = visits(150, seed)
        logs = measured(devices, seed)
        logs[80:] += 0.03
        places.append(found(logs, devices))

    assert all(len(one) == 1 and abs(one[0] - 80) <= 4 for one in places)


def test_step_with_device_change_is_found_after_its_return():
    devices = [0] * 60 + [1] * 20 + [0] * 20
    logs = measured(devices, 1)
    logs[60:] += 0.03

    alone = level_model(np.exp(logs[:80]), devices[:80])

    assert alone.steps == ()
    (change,) = alone.device_changes
    assert change.index == 60
    assert change.relative_change == pytest.approx(np.expm1(0.038), abs=0.003)
    whole = level_model(np.exp(logs), devices)
    assert [one.index for one in whole.steps] == [60]
    assert whole.device_changes == ()


def test_device_with_unchanged_speed_separates_step_from_device():
    devices = [0] * 60 + [3] * 20 + [0] * 20

    model = level_model(np.exp(measured(devices, 2)), devices)

    assert (model.steps, model.device_changes) == ((), ())
    assert model.device_span == pytest.approx(np.expm1(0.02), abs=0.003)


def test_a_step_in_devices_that_never_come_back_is_found():
    # As rented ones: 28 devices, 8 results each, 1 % apart, and 10 % more from the 15th on.
    rng = np.random.default_rng(3)
    devices = np.repeat(np.arange(28), 8)
    logs = 0.003 * rng.standard_normal(224) + np.repeat(0.01 * rng.standard_normal(28), 8)
    assert found(logs, devices.tolist()) == []

    logs[112:] += 0.1

    assert found(logs, devices.tolist()) == [112]


def test_one_device_or_few_values_of_another_change_nothing():
    logs = measured([0] * 100, 5)
    logs[60:] += 0.02
    alone = level_model(np.exp(logs))

    assert level_model(np.exp(logs), ["a"] * 100) == alone
    assert level_model(np.exp(logs), ["a"] * 98 + ["b"] * 2) == alone


def test_values_as_the_newest_device_would_have_measured_them():
    devices = [0] * 40 + [3] * 40 + [0] * 40
    logs = measured(devices, 6)

    moved = np.log(on_newest_device(np.exp(logs), devices))

    assert moved[40:80] == pytest.approx(logs[40:80] - 0.02, abs=0.002)
    assert moved[80:] == pytest.approx(logs[80:])


def test_another_number_of_devices_is_refused():
    with pytest.raises(ValueError, match="one device per value"):
        level_model([1.0] * 10, ["a"] * 9)


@pytest.mark.filterwarnings("error")
def test_values_without_noise_on_two_devices_divide_by_no_noise() -> None:
    found = level_model([1.0] * 10 + [2.0] * 10, devices=[0] * 10 + [1] * 10)

    assert found.steps == ()
    assert [change.index for change in found.device_changes] == [10]
