"""When to stop: warm-up, samples of one placement, and placements until the interval closes."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from flexq_bench.measure.clocks import Rotation
from flexq_bench.measure.protocol import Protocol, WarmUp
from flexq_bench.measure.telemetry import Telemetry
from flexq_bench.stats import Interval, hierarchical_interval, median_interval

_MAX_BATCH = 256  # samples, so that the device's queue of launches never fills
Place = Callable[[int], AbstractContextManager[Rotation]]
Now = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Placement:
    """Samples over one set of freshly allocated buffers, in the order measured.

    times_us: microseconds a launch. valid: per sample, whether the device's clock was high enough.
    device_s: time that all of them took on the device.
    """

    times_us: tuple[float, ...]
    valid: tuple[bool, ...]
    device_s: float

    @property
    def valid_us(self) -> tuple[float, ...]:
        return tuple(t for t, valid in zip(self.times_us, self.valid, strict=True) if valid)


@dataclass(frozen=True, slots=True)
class Sampling:
    """What all placements of a case gave. interval None: not one valid sample."""

    placements: tuple[Placement, ...]
    interval: Interval | None
    converged: bool
    elapsed_s: float

    @property
    def n_valid(self) -> int:
        return sum(len(p.valid_us) for p in self.placements)

    @property
    def n_invalid(self) -> int:
        return sum(len(p.times_us) for p in self.placements) - self.n_valid


def sample_case(
    place: Place,
    protocol: Protocol,
    telemetry: Telemetry,
    *,
    seed: int,
    now: Now = time.perf_counter,
) -> Sampling:
    """Measure fresh placements until the protocol's stop rule holds or it gives up.

    place(i): a context that allocates placement i, yields its rotation and frees it.
    """
    start = now()
    deadline = start + protocol.give_up_s
    share_s = protocol.give_up_s / protocol.min_placements
    placements: list[Placement] = []
    interval: Interval | None = None
    converged = False
    while not converged and (not placements or now() < deadline):
        with place(len(placements)) as rotation:
            phase = protocol.rewarm if placements else protocol.warm_up
            sample_s = warm_up(rotation, phase, protocol.batch_s, now)
            stop_at = min(deadline, now() + share_s)
            placements.append(
                _sample_placement(rotation, protocol, telemetry, sample_s, stop_at, seed, now)
            )
        interval = _interval(placements, protocol, seed)
        converged = _may_stop(placements, interval, protocol)
    return Sampling(tuple(placements), interval, converged, now() - start)


def warm_up(rotation: Rotation, phase: WarmUp, batch_s: float, now: Now) -> float:
    """Run until times settle (see WarmUp). Returns the length of a sample then, in seconds."""
    start = now()
    medians: deque[float] = deque(maxlen=phase.medians)
    count = 1
    while True:
        median_us = statistics.median(rotation.sample(count))
        medians.append(median_us)
        sample_s = median_us * rotation.launches / 1e6
        count = batch_size(sample_s, batch_s)
        elapsed = now() - start
        settled = len(medians) == phase.medians and max(medians) - min(
            medians
        ) <= phase.agreement * min(medians)
        if elapsed >= phase.max_s or (elapsed >= phase.min_s and settled):
            return sample_s


def _sample_placement(
    rotation: Rotation,
    protocol: Protocol,
    telemetry: Telemetry,
    sample_s: float,
    stop_at: float,
    seed: int,
    now: Now,
) -> Placement:
    times: list[float] = []
    valid: list[bool] = []
    while True:
        count = batch_size(sample_s, protocol.batch_s)
        began = now()
        batch = rotation.sample(count)
        is_valid = telemetry.is_clock_valid(began, now())
        times.extend(batch)
        valid.extend([is_valid] * len(batch))
        placement = Placement(tuple(times), tuple(valid), sum(times) * rotation.launches / 1e6)
        if now() >= stop_at or _is_settled(placement, protocol, seed):
            return placement


def _is_settled(placement: Placement, protocol: Protocol, seed: int) -> bool:
    """Whether this placement has its share of samples and its own interval has closed."""
    samples = placement.valid_us
    if len(samples) < protocol.samples_a_placement:
        return False
    if placement.device_s < protocol.device_s_a_placement:
        return False
    interval = median_interval(samples, seed=seed, confidence=protocol.confidence)
    return interval.is_within(protocol.ci_tolerance)


def _may_stop(placements: list[Placement], interval: Interval | None, protocol: Protocol) -> bool:
    counted = [p for p in placements if p.valid_us]
    return (
        interval is not None
        and len(counted) >= protocol.min_placements
        and sum(len(p.valid_us) for p in counted) >= protocol.min_samples
        and sum(p.device_s for p in counted) >= protocol.min_device_s
        and interval.is_within(protocol.ci_tolerance)
    )


def _interval(placements: list[Placement], protocol: Protocol, seed: int) -> Interval | None:
    valid = [p.valid_us for p in placements if p.valid_us]
    if not valid:
        return None
    return hierarchical_interval(valid, seed=seed, confidence=protocol.confidence)


def batch_size(sample_s: float, batch_s: float) -> int:
    """Samples of this length, in seconds, that fill a batch."""
    return max(1, min(_MAX_BATCH, round(batch_s / max(sample_s, 1e-9))))
