"""Sampling: stop rules, regimes, and warm-up."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from flexq_bench.measure import PROTOCOL_CUDA
from flexq_bench.measure.check import CheckResult
from flexq_bench.measure.clocks import Batch
from flexq_bench.measure.outcome import status_of
from flexq_bench.measure.protocol import WarmUp
from flexq_bench.measure.sampling import placements_needed, sample_case, warm_up
from flexq_bench.measure.telemetry import DeviceState, NoSensor, Telemetry
from flexq_bench.stats import Interval

FREE_MHZ = 2000.0
PLACING_S = 0.03


class World:
    """A rotation whose samples and gaps advance the only clock there is.

    mhz(gap / sample): SM clock of samples with such gaps. A launch takes longer at a lower one.
    speeds: factors of a launch's time, of which each sample has a random one.
    """

    launches = 10

    def __init__(
        self, centres, sigma=0.001, launch_us=40.0, mhz=lambda gap: FREE_MHZ, speeds=(1.0,)
    ):
        self.speeds = speeds
        self.centres, self.sigma, self.launch_us, self.mhz = centres, sigma, launch_us, mhz
        self.time_s = 0.0
        self.placement = -1
        self.rng = np.random.default_rng(0)
        self.gaps_us = []

    def now(self):
        return self.time_s

    @contextmanager
    def place(self, index):
        self.placement = index
        self.time_s += PLACING_S
        yield self

    def sample(self, count, *, gap_us=0.0):
        self.gaps_us.append(gap_us)
        sample_us, gap_us = self.launch_us * self.launches, gap_us or 0.0
        mhz = self.mhz(gap_us / sample_us)
        centre = self.launch_us * self.centres[self.placement % len(self.centres)]
        centre *= FREE_MHZ / mhz
        centre = centre * self.rng.choice(self.speeds, count)
        times = self.rng.normal(centre, self.sigma * centre).tolist()
        self.time_s += (sum(times) * self.launches + count * gap_us) / 1e6
        return Batch(tuple(times), (mhz,) * count)

    def close(self):
        pass


class Battery:
    """A sensor whose energy counter moves in steps of 0.1 s, at 500 W; power_w says otherwise."""

    default_sm_clock_mhz = FREE_MHZ

    def __init__(self, now):
        self.now = now

    def read(self):
        return DeviceState(power_w=300.0, energy_j=500.0 * (self.now() // 0.1) / 10)


def run(world, protocol=PROTOCOL_CUDA, free_mhz=FREE_MHZ, **options):
    # No thread (no `with`): nothing but the world's own time passes.
    telemetry = Telemetry(NoSensor(), period_s=0.02, now=world.now)
    return sample_case(
        world.place, protocol, telemetry, seed=1, free_mhz=free_mhz, now=world.now, **options
    )


def test_equal_placements_stop_at_the_fifth():
    sampling = run(World([1.0], sigma=0.0005))

    assert sampling.converged
    assert sampling.regime == "boost"
    assert len(sampling.placements) == 5
    assert sampling.n_valid >= 30
    assert sum(p.device_s for p in sampling.placements) >= 0.02
    assert sampling.interval.is_within(0.0025)


def test_case_on_a_warm_device_takes_less_than_a_second():
    assert run(World([1.0, 1.001, 0.999]), warm=True).elapsed_s < 0.8


def test_different_placements_require_more_placements():
    sampling = run(World([1.0, 1.004, 1.001, 0.997, 1.002, 1.0, 0.999]))

    assert sampling.converged
    assert len(sampling.placements) > 5


def test_placements_of_two_distant_speeds_are_hopeless():
    sampling = run(World([1.0, 1.12]))

    assert sampling.stopped == "hopeless"
    assert len(sampling.placements) == 10
    assert sampling.elapsed_s < 2.0
    assert 0.0025 < sampling.interval.half_width / sampling.interval.estimate < 0.13


def test_outlier_placement_does_not_end_a_case():
    sampling = run(World([1.0, 1.0004, 1.08, 0.9998, 1.0, 1.0002, *[1.0] * 20], sigma=0.0001))

    assert sampling.converged
    assert sampling.interval.estimate == pytest.approx(40.0, rel=0.001)


def test_case_ends_with_its_budget():
    protocol = replace(PROTOCOL_CUDA, budget_s=2.0)
    sampling = run(World([1.0, 1.014], sigma=0.0001), protocol)

    assert sampling.stopped == "budget"
    assert sampling.elapsed_s < 2.3


def test_placements_needed_grow_with_the_squared_scatter():
    few = placements_needed(10, Interval(10.0, 9.99, 10.01), 0.0025)
    many = placements_needed(10, Interval(10.0, 9.96, 10.04), 0.0025)

    assert few < 10
    assert many == pytest.approx(16 * few)


def test_two_speeds_of_placements_settle_on_their_mean():
    sampling = run(World([1.0, 1.012, 1.012, 1.0], sigma=0.0005), warm=True)

    assert sampling.converged
    assert sampling.interval.estimate == pytest.approx(40.0 * 1.006, rel=0.0025)
    assert sampling.interval.low < 40.0 * 1.006 < sampling.interval.high


def test_two_speeds_of_samples_settle_on_their_mean():
    sampling = run(World([1.0, 1.001, 0.999], sigma=0.002, speeds=(1.0, 1.0, 1.06)), warm=True)

    assert sampling.converged
    assert sampling.elapsed_s < 6.0
    assert sampling.interval.estimate == pytest.approx(40.0 * 1.02, rel=0.004)
    assert min(p.time_us for p in sampling.placements) > 40.0 * 1.005  # not one of the speeds


def test_protocol_without_trim_takes_the_median():
    centres = [1.0, 1.0004, 1.5, 0.9996, 1.0002]
    protocol = replace(PROTOCOL_CUDA, trim=None, ci_tolerance=1.0)

    sampling = run(World(centres, sigma=0.0001), protocol)

    assert len(sampling.placements) == 5
    assert sampling.interval.estimate == pytest.approx(40.0 * 1.0002, rel=0.0001)


def test_scatter_of_samples_is_no_scatter_of_placements():
    """Samples scatter by 1.2 %, and placements hardly differ."""
    sampling = run(World([1.0, 1.0005, 0.9995], sigma=0.012), warm=True)

    assert sampling.converged
    assert len(sampling.placements) <= 10


def test_scattering_placement_takes_its_whole_time():
    quiet = run(World([1.0], sigma=0.0005))
    loud = run(World([1.0], sigma=0.05))

    assert len(loud.placements[0].times_us) > 2 * len(quiet.placements[0].times_us)
    assert all(p.device_s < PROTOCOL_CUDA.placement_s for p in loud.placements)


def test_slow_kernel_with_few_samples_has_a_time():
    sampling = run(World([1.0], launch_us=200_000.0))  # a sample is two seconds

    assert not sampling.converged
    assert 1 <= sampling.n_valid < 30
    assert sampling.elapsed_s < 35


def test_samples_have_gaps_of_twice_their_length():
    world = World([1.0], sigma=0.0)

    sampling = run(world)

    assert sampling.gap_us == pytest.approx(2 * 400.0)
    assert world.gaps_us.count(0.0) == 5  # the first sample of each warm-up


def test_gaps_grow_until_the_clock_is_free():
    sampling = run(World([1.0], sigma=0.0005, mhz=lambda gap: FREE_MHZ if gap > 5 else 1500.0))

    assert (sampling.regime, sampling.converged) == ("boost", True)
    assert sampling.gap_us == pytest.approx(6 * 400.0, rel=0.01)
    assert sampling.n_invalid == 0
    assert sampling.sm_clock_mhz == FREE_MHZ


def test_samples_at_a_low_clock_do_not_count():
    world = World([1.0], sigma=0.0005)
    world.mhz = lambda gap: 1400.0 if world.placement == 1 else FREE_MHZ

    sampling = run(world)

    invalid = sampling.placements[1]
    assert invalid.times_us
    assert invalid.valid_us == ()
    assert sampling.n_invalid == len(invalid.times_us)
    assert sampling.converged
    assert len(sampling.counted) == 5
    assert sampling.interval.high < 40.0 * 1.01


def test_clock_is_compared_with_that_of_the_case():
    """Tensor cores run at a lower clock than an idle device, with any gaps."""
    sampling = run(World([1.0], sigma=0.0005, mhz=lambda gap: 1840.0))

    assert sampling.regime == "boost"
    assert sampling.n_invalid == 0
    assert sampling.free.case_mhz == 1840.0
    assert sampling.gap_us == pytest.approx(PROTOCOL_CUDA.gaps[0] * 435.0, rel=0.01)


def test_power_limit_makes_gaps_longer():
    sampling = run(World([1.0], sigma=0.0005, mhz=lambda gap: 1500.0 if gap < 5 else 1840.0))

    assert sampling.regime == "boost"
    assert sampling.sm_clock_mhz == 1840.0
    assert sampling.placements[-1].gap_us == pytest.approx(PROTOCOL_CUDA.gaps[1] * 435.0, rel=0.01)


def test_gaps_stay_short_if_longer_gaps_do_not_help():
    world = World([1.0], sigma=0.0005)
    # Of a short kernel, whose clock scatters about the least that counts.
    scatter = np.random.default_rng(1)
    world.mhz = lambda gap: FREE_MHZ if world.time_s < 0.3 else scatter.choice([1935.0, 1945.0])

    sampling = run(world)

    assert (sampling.regime, sampling.converged) == ("boost", True)
    assert sampling.gap_us == pytest.approx(PROTOCOL_CUDA.gaps[0] * 412.0, rel=0.02)


def test_case_at_low_clocks_is_sustained_with_a_reason():
    sampling = run(World([1.0], sigma=0.0005, mhz=lambda gap: 1000.0))

    assert sampling.regime == "sustained"
    assert sampling.interval.estimate == pytest.approx(40.0 * 2000 / 1000, rel=0.001)
    # 55 % of what the device runs at without load.
    assert "clocked below 1100 MHz (1000 MHz in the median)" in sampling.no_boost
    assert sampling.n_invalid > 0  # what was measured under boost is kept
    assert sampling.gap_us == 0.0


def test_sustained_samples_count_at_any_clock():
    world = World([1.0], sigma=0.0005, mhz=lambda gap: 1400.0)

    sampling = run(world, regime="sustained")

    assert (sampling.regime, sampling.converged) == ("sustained", True)
    assert len(sampling.placements) == PROTOCOL_CUDA.sustained_placements
    assert sampling.n_invalid == 0
    assert sampling.sm_clock_mhz == 1400.0
    assert set(world.gaps_us) == {None}
    assert sampling.elapsed_s > 3 * (1.0 + PROTOCOL_CUDA.sustained_s)


def test_samples_without_a_clock_count():
    world = World([1.0], sigma=0.0005)
    told = world.sample
    world.sample = lambda count, **gap: replace(told(count, **gap), sm_mhz=(None,) * count)

    sampling = run(world, free_mhz=None)

    assert (sampling.regime, sampling.n_invalid) == ("boost", 0)
    assert sampling.sm_clock_mhz is None


def test_power_is_computed_from_the_energy_counter():
    world = World([1.0])
    telemetry = Telemetry(Battery(world.now), period_s=0.02, now=world.now)
    for _ in range(60):  # what the thread does
        telemetry._readings.append((world.now(), telemetry._sensor.read()))
        world.time_s += 0.02

    assert telemetry.mean_power_w(0.0, world.now()) == pytest.approx(500.0, rel=0.03)
    assert telemetry.mean_power_w(0.0, 0.09) == 300.0  # it did not move


def test_requested_interval_decides_the_end():
    world = World([1.0, 1.004, 1.001, 0.997, 1.002])

    loose = run(world, replace(PROTOCOL_CUDA, ci_tolerance=0.05))

    assert loose.converged
    assert len(loose.placements) == 5


def test_fewer_long_samples_suffice():
    """1,024 launches of a slow kernel take 20 ms: each of five placements has a single sample."""
    sampling = run(World([1.0, 1.0004, 0.9996], sigma=0.0001, launch_us=2000.0), warm=True)

    assert sampling.converged
    assert len(sampling.placements) == 5
    assert sampling.n_valid < PROTOCOL_CUDA.min_samples
    assert sampling.elapsed_s < 3


def test_slow_kernel_is_noisy_for_missing_placements():
    sampling = run(World([1.0], sigma=0.0, launch_us=200_000.0))

    status, detail = status_of(CheckResult(0.0, True), sampling, PROTOCOL_CUDA)

    assert status == "noisy"
    assert "after 2 placements and 2 samples, which took" in detail
    assert "5 placements and 30 samples, or 0.1 s on the device, are required" in detail
    assert "0.25 %" not in detail


def test_wide_interval_is_the_reason_of_noisy():
    status, detail = status_of(CheckResult(0.0, True), run(World([1.0, 1.12])), PROTOCOL_CUDA)

    assert status == "noisy"
    assert "and more would not do; ±0.25 % is required" in detail


@pytest.mark.parametrize(
    ("centre", "least_s"),
    [
        (lambda time_s, last: 1.0, 0.3),
        (lambda time_s, last: max(1.0, 2.0 - time_s), 1.0),
        (lambda time_s, last: 1.0 if last == 1.02 else 1.02, 3.0),
    ],
    ids=["equal times: its minimum", "rising clock: until times agree", "never: its maximum"],
)
def test_warm_up_lasts_until_times_agree(centre, least_s):
    class Changing(World):
        def sample(self, count, **gap):
            self.centres = [centre(self.time_s, self.centres[0])]
            return super().sample(count, **gap)

    world = Changing([1.0], sigma=0.0)
    world.placement = 0

    warmed = warm_up(world, WarmUp(min_s=0.3, max_s=3.0), 0.02, world.now)

    assert least_s <= world.time_s < least_s + 0.3
    assert warmed.sample_s == pytest.approx(40.0 * world.centres[0] * 10 / 1e6)
