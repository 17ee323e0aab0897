"""Sequential sampling: warm-up, samples of a placement, placements until the interval closes."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from flexq_bench.measure.clocks import Batch, Rotation
from flexq_bench.measure.protocol import Protocol, WarmUp
from flexq_bench.measure.telemetry import Telemetry
from flexq_bench.stats import Interval, hierarchical_interval, median_interval
from flexq_bench.stats.trimmed_mean import trimmed_mean, trimmed_mean_interval
from flexq_bench.workloads.case import Regime

_MAX_BATCH_SAMPLES = 128  # samples, so that the device's queue of launches never fills
# Outputs are checked once per batch, so a batch of long samples with longer gaps has at least this
# many, in at most this many times the length of a batch.
_MIN_GAPPED_SAMPLES, _MAX_BATCH_LENGTHS = 3, 10
# Number of samples that give a case's own clock without a power limit, and the idle time after
# which no limit is active.
_FREE_SAMPLES, _LONGEST_FREE_GAP_S = 5, 0.02
# Placements from whose interval the required number is predicted, and the fraction of it that must
# exceed the budget. Of ten placements the interval is half again as wide as their spread deserves
# (Student's factor, trimming), and the spread may be a third too large by chance.
_MIN_HOPELESS_PLACEMENTS, _HOPELESS_SHARE = 10, 0.25
_MIN_CLOCK_GAIN = 1.01  # ratio of clocks above which longer gaps are worthwhile
Place = Callable[[int], AbstractContextManager[Rotation]]
Now = Callable[[], float]


@dataclass(frozen=True, slots=True)
class FreeClocks:
    """SM clocks without the power limit. None: not available.

    device_mhz: of the device without load. case_mhz: of the case with gaps long enough to avoid the
    power limit; None: not known yet. Busy tensor cores run at a lower SM clock than memory reads,
    at any gap (on an H200 1,810 to 1,850 MHz where NVML reports 1,980). The effect of a power limit
    can therefore be measured only relative to the same case without it.
    """

    device_mhz: float | None = None
    case_mhz: float | None = None

    def with_case(self, rotation: Rotation, sample_s: float, protocol: Protocol) -> FreeClocks:
        """With the case's own clock, from a few samples with the longest gaps."""
        gap_s = min(protocol.gaps[-1] * sample_s, _LONGEST_FREE_GAP_S)
        count = max(1, min(_FREE_SAMPLES, int(protocol.placement_s / (sample_s + gap_s))))
        batch = rotation.sample(count, gap_us=gap_s * 1e6)
        return replace(self, case_mhz=_median([mhz for mhz in batch.sm_mhz if mhz is not None]))

    def lowered_to(self, batch: Batch) -> FreeClocks:
        """With the clock of these samples as the case's own, if it is lower.

        For a placement whose clock longer gaps did not raise, so that power is not its limit.
        """
        mhz = _median([mhz for mhz in batch.sm_mhz if mhz is not None])
        if mhz is None or self.case_mhz is None or mhz >= self.case_mhz:
            return self
        return replace(self, case_mhz=mhz)

    def least_mhz(self, protocol: Protocol) -> float | None:
        """Lowest SM clock of a sample that counts under `boost`."""
        limits = (
            (self.device_mhz, protocol.min_device_clock_fraction),
            (self.case_mhz, protocol.min_clock_fraction),
        )
        known = [fraction * mhz for mhz, fraction in limits if mhz is not None]
        return max(known, default=None)


@dataclass(frozen=True, slots=True)
class Placement:
    """Samples over one set of freshly allocated buffers, in the order measured.

    times_us: microseconds per launch. valid: per sample, True if it counts in the regime of the
    case. sm_mhz: SM clock during each; None: not available. device_s: device time of all samples.
    gap_us: idle time before each. power_w: mean; None: not under steady load, or not available.
    trim: see Protocol.
    """

    times_us: tuple[float, ...]
    valid: tuple[bool, ...]
    sm_mhz: tuple[float | None, ...]
    device_s: float
    gap_us: float = 0.0
    power_w: float | None = None
    trim: float | None = None

    @property
    def valid_us(self) -> tuple[float, ...]:
        return tuple(t for t, valid in zip(self.times_us, self.valid, strict=True) if valid)

    @property
    def time_us(self) -> float:
        """Trimmed mean, or median, of the samples that count; of a placement that has one."""
        return location(self.valid_us, self.trim)

    @property
    def valid_mhz(self) -> tuple[float, ...]:
        """SM clocks of the samples that count, if known."""
        clocks = zip(self.sm_mhz, self.valid, strict=True)
        return tuple(mhz for mhz, valid in clocks if valid and mhz is not None)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Samples of all placements of a case, with their interval.

    regime: of the interval. no_boost: why it is not `boost` although that was requested; otherwise
    empty. stopped: "closed", "hopeless" (placements vary too much for the budget) or "budget".
    free: the clocks with which samples under `boost` were compared.
    """

    regime: Regime
    placements: tuple[Placement, ...]
    interval: Interval
    stopped: str
    elapsed_s: float
    no_boost: str = ""
    free: FreeClocks = FreeClocks()

    @property
    def converged(self) -> bool:
        return self.stopped == "closed"

    @property
    def counted(self) -> tuple[Placement, ...]:
        """Placements with samples that count."""
        return tuple(p for p in self.placements if p.valid_us)

    @property
    def n_valid(self) -> int:
        return sum(len(p.valid_us) for p in self.placements)

    @property
    def n_invalid(self) -> int:
        return sum(len(p.times_us) for p in self.placements) - self.n_valid

    @property
    def sm_clock_mhz(self) -> float | None:
        """Median SM clock of the samples that count."""
        return _median([mhz for p in self.placements for mhz in p.valid_mhz])

    @property
    def gap_us(self) -> float:
        """Idle time before each sample of the last placement."""
        return self.placements[-1].gap_us

    @property
    def power_w(self) -> float | None:
        """Median over placements under steady load."""
        return _median([p.power_w for p in self.counted if p.power_w is not None])


def sample_case(
    place: Place,
    protocol: Protocol,
    telemetry: Telemetry,
    *,
    seed: int,
    regime: Regime = "boost",
    free_mhz: float | None = None,
    warm: bool = False,
    now: Now = time.perf_counter,
) -> Sampling:
    """Measure fresh placements until the protocol's stop rule holds.

    place(i): a context that allocates placement i, yields its rotation and frees it. free_mhz: SM
    clock of the device without load; None: not available. warm: the device was just busy. If no
    sample of a case reaches that clock, the case is measured under `sustained`.
    """
    sampler = _Sampler(place, protocol, telemetry, seed, FreeClocks(free_mhz), now)
    if regime == "sustained":
        return sampler.sustained()
    return sampler.boost(warm=warm)


@dataclass
class _Sampler:
    """State of a measurement. gap: index into protocol.gaps."""

    _place: Place
    _protocol: Protocol
    _telemetry: Telemetry
    _seed: int
    _free: FreeClocks
    _now: Now
    _gap: int = 0
    _placements: list[Placement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self._now()

    def boost(self, *, warm: bool) -> Sampling:
        protocol = self._protocol
        interval, stopped = None, ""
        while not stopped:
            with self._place(len(self._placements)) as rotation:
                is_warm = warm or bool(self._placements)
                phase = protocol.rewarm if is_warm else protocol.warm_up
                self._placements.append(self._boost_placement(rotation, phase))
            interval = self._interval(self._placements)
            stopped = self._stop(interval)
        if interval is not None:
            return self._sampling("boost", interval, stopped)
        clocks = [mhz for p in self._placements for mhz in p.sm_mhz if mhz is not None]
        least_mhz = self._free.least_mhz(self._protocol)
        return self.sustained(
            f"all {len(clocks)} samples were clocked below {least_mhz:.0f} MHz "
            f"({statistics.median(clocks):.0f} MHz in the median), also with gaps of "
            f"{self._placements[-1].gap_us / 1000:.3g} ms: look for throttling"
        )

    def sustained(self, no_boost: str = "") -> Sampling:
        first = len(self._placements)
        for index in range(first, first + self._protocol.sustained_placements):
            with self._place(index) as rotation:
                self._placements.append(self._steady_placement(rotation))
        interval = self._interval(self._placements[first:])
        assert interval is not None  # every sample under steady load counts
        closed = interval.is_within(self._protocol.ci_tolerance)
        stopped = "closed" if closed else "budget"
        return self._sampling("sustained", interval, stopped, no_boost)

    def _sampling(
        self, regime: Regime, interval: Interval, stopped: str, no_boost: str = ""
    ) -> Sampling:
        elapsed_s = self._now() - self._began
        placements = tuple(self._placements)
        return Sampling(regime, placements, interval, stopped, elapsed_s, no_boost, self._free)

    def _boost_placement(self, rotation: Rotation, phase: WarmUp) -> Placement:
        protocol, now = self._protocol, self._now
        warmed, self._gap, self._free = warm_up_under_boost(
            rotation, phase, protocol, self._free, now, gap=self._gap
        )
        began = now()
        return self._sample(
            rotation,
            warmed.sample_s,
            gap=protocol.gaps[self._gap],
            is_done=lambda placement: (
                now() - began >= protocol.placement_s or self._is_settled(placement)
            ),
        )

    def _steady_placement(self, rotation: Rotation) -> Placement:
        protocol, now = self._protocol, self._now
        warmed = warm_up(rotation, protocol.sustained, protocol.batch_s, now, gap=None)
        began = now()
        return self._sample(
            rotation,
            warmed.sample_s,
            gap=None,
            is_done=lambda _: now() - began >= protocol.sustained_s,
        )

    def _sample(
        self,
        rotation: Rotation,
        sample_s: float,
        *,
        gap: float | None,
        is_done: Callable[[Placement], bool],
    ) -> Placement:
        """Take batches until the placement is done.

        gap: in lengths of a sample; None: steady load, under which every sample counts and power is
        read.
        """
        gap_us = None if gap is None else gap * sample_s * 1e6
        count = _gapped_batch(sample_s, gap_us or 0.0, self._protocol.batch_s)
        times: list[float] = []
        clocks: list[float | None] = []
        started = self._now()
        while True:
            began = self._now()
            batch = rotation.sample(count, gap_us=gap_us)
            self._telemetry.note(began, self._now())
            times.extend(batch.times_us)
            clocks.extend(batch.sm_mhz)
            least_mhz = self._free.least_mhz(self._protocol)
            valid = [gap is None or not is_low(mhz, least_mhz) for mhz in clocks]
            placement = Placement(
                tuple(times),
                tuple(valid),
                tuple(clocks),
                sum(times) * rotation.launches / 1e6,
                gap_us or 0.0,
                self._telemetry.mean_power_w(started, self._now()) if gap is None else None,
                self._protocol.trim,
            )
            if is_done(placement):
                return placement

    def _is_settled(self, placement: Placement) -> bool:
        """Return True if this placement has enough samples and its own interval has closed."""
        protocol, samples = self._protocol, placement.valid_us
        if not samples or not protocol.is_enough(len(samples), placement.device_s):
            return False
        if protocol.trim is None:
            interval = median_interval(samples, seed=self._seed, confidence=protocol.confidence)
        elif len(samples) > 1:
            interval = trimmed_mean_interval(
                samples, trim=protocol.trim, confidence=protocol.confidence
            )
        else:
            return True  # one sample that is long enough
        return interval.is_within(protocol.ci_tolerance)

    def _interval(self, placements: list[Placement]) -> Interval | None:
        counted = [p for p in placements if p.valid_us]
        if not counted:
            return None
        trim, confidence = self._protocol.trim, self._protocol.confidence
        if trim is None or len(counted) == 1:
            samples = [p.valid_us for p in counted]
            return hierarchical_interval(samples, seed=self._seed, confidence=confidence)
        times = [p.time_us for p in counted]
        return trimmed_mean_interval(times, trim=trim, confidence=confidence)

    def _stop(self, interval: Interval | None) -> str:
        """Return the reason to stop now (see Sampling.stopped); empty: go on."""
        protocol = self._protocol
        counted = [p for p in self._placements if p.valid_us]
        elapsed_s = self._now() - self._began
        if (
            interval is not None
            and are_enough(counted, protocol)
            and interval.is_within(protocol.ci_tolerance)
        ):
            return "closed"
        if interval is None and len(self._placements) >= protocol.min_placements:
            return "hopeless"
        if interval is not None and len(counted) >= max(
            _MIN_HOPELESS_PLACEMENTS, protocol.min_placements
        ):
            needed = placements_needed(len(counted), interval, protocol.ci_tolerance)
            if elapsed_s * _HOPELESS_SHARE * needed / len(self._placements) > protocol.budget_s:
                return "hopeless"
        return "budget" if elapsed_s >= protocol.budget_s else ""


def are_enough(counted: Sequence[Placement], protocol: Protocol) -> bool:
    """Return True if placements, samples and device time are enough for a case to stop."""
    least = protocol.min_placements
    samples, device_s = sum(len(p.valid_us) for p in counted), sum(p.device_s for p in counted)
    return len(counted) >= least and protocol.is_enough(samples, device_s, placements=least)


def placements_needed(count: int, interval: Interval, tolerance: float) -> float:
    """Estimated number of placements until their interval is ± tolerance wide.

    interval: of `count` placements. It narrows with the square root of their number.
    """
    return count * (interval.half_width / (tolerance * interval.estimate)) ** 2


@dataclass(frozen=True, slots=True)
class Warmed:
    """sample_s: length of a sample after the times have settled, in seconds. batch: the last
    samples.
    """

    sample_s: float
    batch: Batch


def warm_up(
    rotation: Rotation, phase: WarmUp, batch_s: float, now: Now, *, gap: float | None = 0.0
) -> Warmed:
    """Run until times settle (see WarmUp).

    gap: idle before each sample, in lengths of a sample; None: steady load.
    """
    start = now()
    medians: deque[float] = deque(maxlen=phase.medians)
    count, turns = 1, 0
    gap_us = None if gap is None else 0.0
    while True:
        batch = rotation.sample(count, gap_us=gap_us)
        medians.append(batch.median_us)
        sample_s = batch.median_us * rotation.launches / 1e6
        gap_us = None if gap is None else gap * sample_s * 1e6
        count = _gapped_batch(sample_s, gap_us or 0.0, batch_s)
        elapsed = now() - start
        settled = len(medians) == phase.medians and max(medians) - min(
            medians
        ) <= phase.agreement * min(medians)
        turns += 1
        # The first sample had no gap.
        if turns > 1 and (elapsed >= phase.max_s or (elapsed >= phase.min_s and settled)):
            return Warmed(sample_s, batch)


def warm_up_under_boost(
    rotation: Rotation,
    phase: WarmUp,
    protocol: Protocol,
    free: FreeClocks,
    now: Now,
    *,
    gap: int = 0,
) -> tuple[Warmed, int, FreeClocks]:
    """Warm up with gaps, and with longer ones while most samples run at too low a clock.

    gap: index into protocol.gaps to start with. Returns the one that it ended with, and the clocks
    known by then. Gaps that do not raise the clock are not used, because power is then not the
    limit.
    """
    shorter: tuple[Warmed, float] | None = None  # with the previous gap, and its clock
    while True:
        warmed = warm_up(rotation, phase, protocol.batch_s, now, gap=protocol.gaps[gap])
        clocks = [mhz for mhz in warmed.batch.sm_mhz if mhz is not None]
        if free.case_mhz is None and clocks:
            free = free.with_case(rotation, warmed.sample_s, protocol)
        mhz = _median(clocks)
        if mhz is not None and shorter is not None and mhz < _MIN_CLOCK_GAIN * shorter[1]:
            return shorter[0], gap - 1, free
        if (
            mhz is None
            or not is_low(mhz, free.least_mhz(protocol))
            or gap + 1 == len(protocol.gaps)
        ):
            return warmed, gap, free
        gap, phase, shorter = gap + 1, protocol.rewarm, (warmed, mhz)


def location(samples_us: Sequence[float], trim: float | None) -> float:
    """Time of samples that belong together: their trimmed mean, without `trim` their median."""
    if trim is None:
        return statistics.median(samples_us)
    return trimmed_mean(samples_us, trim=trim)


def is_low(mhz: float | None, least_mhz: float | None) -> bool:
    """Return True if a sample's SM clock is too low for `boost`; False if not known."""
    return mhz is not None and least_mhz is not None and mhz < least_mhz


def batch_size(sample_s: float, batch_s: float) -> int:
    """Number of samples of this length, in seconds, that fill a batch."""
    return max(1, min(_MAX_BATCH_SAMPLES, round(batch_s / max(sample_s, 1e-9))))


def _gapped_batch(sample_s: float, gap_us: float, batch_s: float) -> int:
    """Number of samples that fill a batch including gaps; with gaps at least a few."""
    whole_s = sample_s + gap_us / 1e6
    least = min(_MIN_GAPPED_SAMPLES, int(_MAX_BATCH_LENGTHS * batch_s / whole_s)) if gap_us else 1
    return max(least, batch_size(whole_s, batch_s))


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
