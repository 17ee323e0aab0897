"""Classification of a series by the patterns that its newest nights show."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.level_model import on_newest_device
from flexq_bench.stats.log_series import (
    SCALE_FLOOR,
    SMALLEST_CHANGE,
    SMALLEST_LOG_RATIO,
    SPIKE_SIGMAS,
    Floats,
    positive_logs,
    step_proof_scale,
    without_spikes,
)
from flexq_bench.stats.newest_step import FEWEST_POINTS
from flexq_bench.verdicts.alert_rule import CLOCK_TOLERANCE
from flexq_bench.verdicts.change_points import Point, find_change_points

_MIN_DRIFT_RESULTS = 20
_MAX_DRIFT_P_VALUE = 1e-4


class Pattern(StrEnum):
    NEW_SERIES = "new-series"  # no earlier results to compare with
    NEW_EPOCH = "new-epoch"  # driver, CUDA or torch changed: classified from here on
    CLOCK_DROP = "clock-drop"  # the clock explains the change
    SPIKE = "spike"  # one or two nights, and back
    STEP = "step"
    NEW_DEVICE = "new-device"  # the level changed with the device, which may be the only cause
    DRIFT = "drift"  # slow change, not explained by a step
    TOO_FEW = "too-few"  # no pattern, and too few nights to detect a step
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class Nights:
    """A series with the recorded conditions; all [n], oldest first.

    values: any unit. days: ordinal of the night. epochs: equal for equal environments. clocks_mhz:
    SM clock while measuring; None: unknown. devices: equal for equal devices; None: one device.
    """

    values: ArrayLike
    days: ArrayLike
    epochs: ArrayLike
    clocks_mhz: ArrayLike | None = None
    devices: Sequence[Hashable] | None = None


@dataclass(frozen=True, slots=True)
class Classification:
    """pattern of the newest epoch; index of the value where it begins, None: everywhere.

    missing: nights without a result, as (first, last) days; the pattern is that of the existing
    ones.
    """

    pattern: Pattern
    index: int | None
    missing: tuple[tuple[int, int], ...]


def classify(nights: Nights) -> Classification:
    """The pattern that explains a series, the outermost cause first.

    A single night is a new series; fewer than 3 after a change of environment are a new epoch.
    Otherwise the newest epoch is classified, as the newest device would have measured it: a step
    that the clock explains, a drift, a step, a spike, a level that changed with the device. Without
    any of these, a series with too few nights for change points is too few, not steady. Raises
    ValueError if lengths differ.
    """
    values = np.asarray(nights.values, dtype=np.float64)
    epochs, days = np.asarray(nights.epochs), np.asarray(nights.days, dtype=np.int64)
    clocks = None if nights.clocks_mhz is None else np.asarray(nights.clocks_mhz, dtype=np.float64)
    for other in (epochs, days, clocks):
        if other is not None and other.shape != values.shape:
            raise ValueError(f"one entry a night is needed, got {other.shape}, {values.shape}")
    if nights.devices is not None and len(nights.devices) != values.size:
        raise ValueError(f"one device a night is needed, got {len(nights.devices)}, {values.size}")
    missing = missing_nights(days)
    _, usable = positive_logs(values)
    if usable.size <= 1:
        return Classification(Pattern.NEW_SERIES, None, missing)
    start = epoch_start(epochs)
    if start > 0 and values.size - start < 3:
        return Classification(Pattern.NEW_EPOCH, start, missing)
    newest = values[start:]
    devices = nights.devices[start:] if nights.devices is not None else ()
    has_several = len(set(devices)) > 1  # for one device a second model would be the same
    if has_several:
        newest = on_newest_device(newest, devices)
    pattern, index = _shape(newest, None if clocks is None else clocks[start:])
    if pattern is Pattern.STEADY and has_several:
        points = [Point(*one) for one in zip(values[start:].tolist(), devices, strict=True)]
        model = find_change_points(points).model
        changes = [
            change.index
            for change in model.device_changes
            if abs(change.relative_change) >= SMALLEST_CHANGE
        ]
        if changes:
            pattern, index = Pattern.NEW_DEVICE, changes[-1]
    if pattern is Pattern.STEADY and positive_logs(values[start:])[1].size < FEWEST_POINTS:
        return Classification(Pattern.TOO_FEW, None, missing)
    return Classification(pattern, None if index is None else start + index, missing)


def missing_nights(days: ArrayLike) -> tuple[tuple[int, int], ...]:
    """(first, last) of every run of days without a night, of [n] ordinals in any order."""
    there = np.unique(np.asarray(days, dtype=np.int64))
    return tuple((int(a) + 1, int(b) - 1) for a, b in pairwise(there) if b - a > 1)


def epoch_start(epochs: ArrayLike) -> int:
    """Index of the first value of the newest epoch; 0 for an empty or unbroken series."""
    labels = np.asarray(epochs)
    changes = np.flatnonzero(labels[1:] != labels[:-1])
    return int(changes[-1]) + 1 if changes.size else 0


def spikes(values: ArrayLike) -> tuple[int, ...]:
    """Indices of outliers, single or in pairs, relative to both sides."""
    logs, index = positive_logs(values)
    return tuple(int(i) for i in index[without_spikes(logs) != logs])


def drift(values: ArrayLike) -> float | None:
    """ln change over the whole series if it changes in one direction without a step; otherwise
    None.

    A drift has at least 20 values, a change of at least 1 %, a significant trend (Mann and
    Kendall's test on every second value, because neighbours may be dependent), and a straight line
    (Theil and Sen) with smaller residuals than the best single step and than all change points
    together (Schwarz 1978, which allows for their number of parameters).
    """
    from scipy import stats  # imported here because it takes half a second

    logs, _ = positive_logs(values)
    if logs.size < _MIN_DRIFT_RESULTS or float(np.ptp(logs)) == 0:
        return None
    logs = without_spikes(logs)
    time = np.arange(logs.size, dtype=np.float64)
    if stats.kendalltau(time[::2], logs[::2]).pvalue > _MAX_DRIFT_P_VALUE:
        return None
    slope, intercept, _, _ = stats.theilslopes(logs, time)
    change = float(slope) * (logs.size - 1)
    line = logs - (intercept + slope * time)
    residual = float(line @ line)
    if abs(change) < SMALLEST_LOG_RATIO or residual >= _best_step_residual(logs):
        return None
    steps = _step_indices(np.exp(logs))
    if steps and _criterion(_levels_residual(logs, steps), 2 * len(steps) + 1, logs.size) < (
        _criterion(residual, 2, logs.size)
    ):
        return None
    return change


def clock_explains(values: ArrayLike, clocks_mhz: ArrayLike, index: int) -> bool:
    """Return True if the clock changed at `index` and the number of cycles did not.

    values: [n] times. clocks_mhz: [n] of the SM. Medians are taken before `index` and from it on.
    The clock must change by more than 1 %, and time x clock by less than half of the time's change.
    """
    times, clocks = (np.asarray(a, dtype=np.float64) for a in (values, clocks_mhz))
    usable = np.isfinite(times) & np.isfinite(clocks) & (times > 0) & (clocks > 0)
    before, after = usable.copy(), usable.copy()
    before[index:], after[:index] = False, False
    if not before.any() or not after.any():
        return False
    time = float(np.median(np.log(times[after])) - np.median(np.log(times[before])))
    clock = float(np.median(np.log(clocks[after])) - np.median(np.log(clocks[before])))
    return abs(clock) > CLOCK_TOLERANCE and abs(time + clock) < abs(time) / 2


def _shape(values: Floats, clocks: Floats | None) -> tuple[Pattern, int | None]:
    steps = _step_indices(values)
    odd = spikes(values)
    tail = _fresh_tail(values)
    if clocks is not None:
        for index in (*steps, *odd, *tail):
            if clock_explains(values[: index + 3], clocks[: index + 3], index):
                return Pattern.CLOCK_DROP, index
    if drift(values) is not None:
        return Pattern.DRIFT, None
    if steps:
        return Pattern.STEP, steps[-1]
    if odd:
        return Pattern.SPIKE, odd[-1]
    return Pattern.STEADY, None


def _step_indices(values: Floats) -> list[int]:
    found = find_change_points([Point(one) for one in values.tolist()])
    return [change.index for change in found.with_waiting]


def _fresh_tail(values: Floats) -> tuple[int, ...]:
    """Index of the newest value if it is an outlier: the start of a spike or of a step."""
    logs, index = positive_logs(values)
    if logs.size < 3:
        return ()
    limit = SPIKE_SIGMAS * step_proof_scale(logs)
    return (int(index[-1]),) if abs(logs[-1] - float(np.median(logs))) > limit else ()


def _criterion(residual: float, parameters: int, size: int) -> float:
    """Schwarz's criterion (smaller is better) of a sum of squares of `size` values from a fit."""
    # lower limit: smaller residuals are below the resolution of the measurement
    least = size * (SCALE_FLOOR / 2) ** 2
    return size * float(np.log(max(residual, least) / size)) + parameters * float(np.log(size))


def _levels_residual(logs: Floats, steps: list[int]) -> float:
    """Sum of squares from the means between steps."""
    return float(sum(np.sum((part - part.mean()) ** 2) for part in np.split(logs, steps)))


def _best_step_residual(logs: Floats) -> float:
    """Sum of squares from the two means of the best single split."""
    size = logs.size
    centered = logs - logs.mean()
    sizes_left = np.arange(1, size)
    sums = np.cumsum(centered)[:-1]
    return float(centered @ centered - np.max(sums**2 * size / (sizes_left * (size - sizes_left))))
