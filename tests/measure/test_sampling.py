"""When sampling stops, what counts, and how long the warm-up lasts."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from flexq_bench.measure import PROTOCOL_CUDA
from flexq_bench.measure.protocol import WarmUp
from flexq_bench.measure.sampling import sample_case, warm_up
from flexq_bench.measure.telemetry import DeviceState, NoSensor, Telemetry


class World:
    """A rotation whose samples advance the only clock there is."""

    launches = 10

    def __init__(self, centres, sigma=0.001, launch_us=40.0):
        self.centres, self.sigma, self.launch_us = centres, sigma, launch_us
        self.time_s = 0.0
        self.placement = -1
        self.rng = np.random.default_rng(0)

    def now(self):
        return self.time_s

    @contextmanager
    def place(self, index):
        self.placement = index
        yield self

    def sample(self, count):
        centre = self.launch_us * self.centres[self.placement % len(self.centres)]
        times = self.rng.normal(centre, self.sigma * centre, count).tolist()
        self.time_s += sum(times) * self.launches / 1e6
        return times

    def close(self):
        pass


class Sensor:
    """An SM clock that depends on the time; its default is 2,000 MHz."""

    def __init__(self, sm_clock_mhz, default=2000.0):
        self.default_sm_clock_mhz = default
        self.sm_clock_mhz = sm_clock_mhz

    def read(self):
        return DeviceState(sm_clock_mhz=self.sm_clock_mhz(), throttle_mask=4, power_w=300.0)


def run(world, protocol=PROTOCOL_CUDA, sensor=None):
    # No thread (no `with`): each batch reads the sensor itself, at the world's own time.
    telemetry = Telemetry(
        sensor or NoSensor(), min_clock_fraction=0.75, period_s=0.02, now=world.now
    )
    return sample_case(world.place, protocol, telemetry, seed=1, now=world.now), telemetry


def test_equal_placements_stop_at_the_fifth_with_the_least_samples_and_device_time():
    sampling, _ = run(World([1.0], sigma=0.0005))

    assert sampling.converged
    assert len(sampling.placements) == 5
    assert sampling.n_valid >= 50
    assert sum(p.device_s for p in sampling.placements) >= 0.2
    assert sampling.interval.is_within(0.0025)


def test_placements_that_differ_are_followed_by_more_of_them():
    sampling, _ = run(World([1.0, 1.004, 1.001, 0.997, 1.002, 1.0, 0.999]))

    assert sampling.converged
    assert len(sampling.placements) > 5


def test_two_speeds_a_process_can_fall_into_give_up_after_fifteen_seconds():
    sampling, _ = run(World([1.0, 1.12]))

    assert not sampling.converged
    assert 15 <= sampling.elapsed_s < 19
    assert not sampling.interval.is_within(0.0025)


def test_a_placement_that_scatters_goes_on_until_its_own_interval_closes():
    quiet, _ = run(World([1.0], sigma=0.0005))
    loud, _ = run(World([1.0], sigma=0.05))

    assert len(loud.placements[0].times_us) > 2 * len(quiet.placements[0].times_us)


def test_a_kernel_too_slow_for_fifty_samples_gives_up_instead_of_going_on():
    sampling, _ = run(World([1.0], launch_us=200_000.0))  # a sample is two seconds

    assert not sampling.converged
    assert 1 <= sampling.n_valid < 50
    assert sampling.elapsed_s < 25


def test_samples_at_a_low_clock_are_kept_but_not_counted():
    world = World([1.0], sigma=0.0005)
    sensor = Sensor(lambda: 1400.0 if world.placement == 1 else 1900.0)

    sampling, _ = run(world, sensor=sensor)

    invalid = sampling.placements[1]
    assert invalid.times_us
    assert invalid.valid_us == ()
    assert sampling.n_invalid == len(invalid.times_us)
    assert sampling.converged
    assert len([p for p in sampling.placements if p.valid_us]) == 5


def test_a_placement_without_a_valid_sample_does_not_count_as_one():
    world = World([1.0], sigma=0.0001)
    sensor = Sensor(lambda: 1400.0 if world.placement == 1 else 1900.0)
    few = replace(PROTOCOL_CUDA, min_samples=5, min_device_s=0.001)

    sampling, _ = run(world, few, sensor)

    assert len(sampling.placements) == 6


def test_slow_samples_at_a_low_clock_do_not_move_the_median():
    world = World([1.0, 1.5, 1.0, 1.0, 1.0, 1.0], sigma=0.0005)
    sensor = Sensor(lambda: 1000.0 if world.placement == 1 else 1900.0)

    sampling, _ = run(world, sensor=sensor)

    assert sampling.interval.high < 40.0 * 1.01


def test_a_device_that_never_clocks_high_enough_has_no_interval():
    sampling, _ = run(World([1.0]), sensor=Sensor(lambda: 345.0))

    assert sampling.interval is None
    assert sampling.n_valid == 0
    assert not sampling.converged


def test_power_capping_alone_is_tagged_and_not_discarded():
    sampling, telemetry = run(World([1.0], sigma=0.0005), sensor=Sensor(lambda: 1600.0))

    assert sampling.n_invalid == 0
    assert telemetry.summary() == DeviceState(sm_clock_mhz=1600.0, power_w=300.0, throttle_mask=4)


def test_warm_up_lasts_at_least_its_minimum_even_where_times_agree_at_once():
    world = World([1.0], sigma=0.0)

    world.placement = 0
    warm_up(world, PROTOCOL_CUDA.warm_up, 0.02, world.now)

    assert 0.3 <= world.time_s < 0.4


def test_warm_up_goes_on_while_the_clock_ramps_up():
    class Ramp(World):
        def sample(self, count):
            self.centres = [max(1.0, 2.0 - self.time_s)]
            return super().sample(count)

    world = Ramp([1.0], sigma=0.0)
    world.placement = 0

    sample_s = warm_up(world, PROTOCOL_CUDA.warm_up, 0.02, world.now)

    assert 1.0 <= world.time_s < 1.3
    assert sample_s == pytest.approx(40.0 * 10 / 1e6)


def test_warm_up_ends_at_its_maximum_where_times_never_agree():
    class Restless(World):
        def sample(self, count):
            self.centres = [1.0 if self.centres == [1.02] else 1.02]
            return super().sample(count)

    world = Restless([1.0], sigma=0.0)
    world.placement = 0

    warm_up(world, WarmUp(min_s=0.3, max_s=3.0), 0.02, world.now)

    assert 3.0 <= world.time_s < 3.1


def test_the_interval_asked_for_decides_when_to_stop():
    world = World([1.0, 1.004, 1.001, 0.997, 1.002])

    loose, _ = run(world, replace(PROTOCOL_CUDA, ci_tolerance=0.05))

    assert loose.converged
    assert len(loose.placements) == 5
