"""From samples, checks and telemetry to a status with its reason."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from flexq_bench.measure.check import CheckResult
from flexq_bench.measure.measured import Measured
from flexq_bench.measure.protocol import Protocol
from flexq_bench.measure.sampling import Sampling
from flexq_bench.measure.telemetry import Telemetry

_US_A_SECOND = 1e6


def status_of(check: CheckResult, sampling: Sampling, protocol: Protocol) -> tuple[str, str]:
    """Status and detail. Incorrect precedes noisy: the time of a wrong kernel means nothing."""
    if not check.is_correct:
        return "incorrect", check.detail
    if sampling.converged:
        return "ok", ""
    interval, counted = sampling.interval, sampling.counted
    width = 100 * interval.half_width / interval.estimate
    reached = (
        f"the interval is ±{width:.3g} % after {len(counted)} placements and "
        f"{sampling.n_valid} samples"
    )
    if interval.is_within(protocol.ci_tolerance):
        return "noisy", (
            f"{reached}, which took {sampling.elapsed_s:.1f} s; "
            f"{protocol.min_placements} placements and {protocol.min_samples} samples, or "
            f"{protocol.long_device_s:g} s on the device, are required"
        )
    ended = ", and more would not do" if sampling.stopped == "hopeless" else ""
    return "noisy", f"{reached}{ended}; ±{100 * protocol.ci_tolerance:.3g} % is required"


def with_times(measured: Measured, sampling: Sampling) -> Measured:
    """The result with its samples and statistics. Invalid samples are stored but not counted."""
    interval, power_w = sampling.interval, sampling.power_w
    return replace(
        measured,
        regime=sampling.regime,
        sample_gap_us=sampling.gap_us,
        launch_j=None if power_w is None else power_w * interval.estimate / _US_A_SECOND,
        median_us=interval.estimate,
        ci_low_us=interval.low,
        ci_high_us=interval.high,
        n_samples=sampling.n_valid,
        n_invalid=sampling.n_invalid,
        placement_medians_us=tuple(p.time_us for p in sampling.counted),
        samples_us=tuple(p.times_us for p in sampling.placements),
    )


def judge_speed(
    measured: Measured, floor: Measured, launch_us: float, protocol: Protocol
) -> Measured:
    """The result, or an incorrect one if it took less time than reading its weights takes.

    measured: with cold weights. floor: of the probe that reads as many bytes. launch_us: of an
    empty launch, 0 if unknown.
    """
    if not (measured.is_comparable and floor.is_comparable):
        return measured
    # is_comparable implies that both have times.
    assert measured.ci_high_us is not None
    assert measured.median_us is not None
    assert floor.ci_low_us is not None
    assert floor.median_us is not None
    least_us = (floor.ci_low_us - launch_us) / protocol.floor_margin
    if measured.ci_high_us >= least_us:
        return measured
    share = 100 * floor.median_us / measured.median_us
    return replace(
        measured,
        status="incorrect",
        detail=(
            f"faster than reading its weights allows: {measured.median_us:.4g} us, the floor is "
            f"{floor.median_us:.4g} us ({share:.0f} % of floor) and {least_us:.4g} us is the least "
            "that is believed: find out which of its launches don't do their work"
        ),
    )


def extra_facts(
    sampling: Sampling,
    protocol: Protocol,
    telemetry: Telemetry,
    **facts: Any,
) -> dict[str, Any]:
    """Collect the values that are stored with the statistics: see Measured.extra."""
    before, after = telemetry.before, telemetry.after
    extra: dict[str, Any] = {"elapsed_s": round(sampling.elapsed_s, 3), **facts}
    if before is not None and before.sm_clock_mhz is not None:
        extra["before"] = before.as_dict()
    if after is not None and after.sm_clock_mhz is not None:
        extra["after"] = after.as_dict()
    clocks = [statistics.median(p.valid_mhz) for p in sampling.counted if p.valid_mhz]
    if sampling.free.device_mhz is not None:
        extra["free_mhz"] = round(sampling.free.device_mhz, 1)
        extra["placement_mhz"] = [round(mhz, 1) for mhz in clocks]
    if sampling.free.case_mhz is not None:
        extra["case_mhz"] = round(sampling.free.case_mhz, 1)
    if sampling.no_boost:
        extra["no_boost"] = sampling.no_boost
    if sampling.n_invalid:
        extra["invalid"] = {
            "reason": (
                f"SM clock below {100 * protocol.min_clock_fraction:.0f} % of the case's own with "
                f"long gaps, or {100 * protocol.min_device_clock_fraction:.0f} % of the device's "
                "without load"
            ),
            "samples": [
                [i for i, valid in enumerate(p.valid) if not valid] for p in sampling.placements
            ],
        }
    return extra
