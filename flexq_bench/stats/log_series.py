"""Logarithms of a series: spikes, robust scale and autocorrelation of its noise."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Smallest change that counts, as a fraction of the level before, and as a log ratio.
SMALLEST_CHANGE = 0.01
SMALLEST_LOG_RATIO = float(np.log1p(SMALLEST_CHANGE))
MAD_TO_SIGMA = 1.482602218505602  # of a Gaussian: 1 / Phi^-1(3/4)
# ln: the scatter of blocks within one process on an idle H200 (docs/statistics.md).
SCALE_FLOOR = 0.002
SPIKE_SIGMAS = 5.0
_SPIKE_WINDOW = 5  # a median of 5 passes a step unchanged and no run of 1 or 2 values
MAX_AUTOCORRELATION = 0.8
# relative to the largest value: smaller differences are rounding of the arithmetic
SAME_VALUE = 1e-12
_RETURNS = 2  # runs of each value, on average, above which values count as rounded
_TRIMMED_TO_SIGMA = 1.263  # of a Gaussian without its largest tenth


def positive_logs(values: ArrayLike) -> tuple[Floats, Ints]:
    """Natural logs of the positive finite values, and their indices.

    values: [n], any unit; NaN, infinities, zeros and negative values are excluded. Raises
    ValueError if values is not one-dimensional or contains anything but numbers.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"a series has one dimension, got {array.ndim}")
    with np.errstate(invalid="ignore"):
        index = np.flatnonzero(np.isfinite(array) & (array > 0))
    return np.log(array[index]), index.astype(np.int64)


def run_bounds(values: NDArray[np.bool_] | Floats | Ints) -> Ints:
    """Return the indices at which runs of equal values [n] begin, and n."""
    switches = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.concatenate(([0], switches, [values.size])).astype(np.int64)


def differences(values: Floats) -> Floats:
    """Differences [n - 1] of neighbours of values [n]; for few values faster than numpy's."""
    return values[1:] - values[:-1]


def mean(values: Floats) -> float:
    """Mean of values [n]; for few values faster than numpy's."""
    return float(np.add.reduce(values)) / values.size


def median(windows: Floats) -> Floats:
    """Medians [...] of windows [..., n]; for few values many times as fast as numpy's."""
    ordered = np.sort(windows, axis=-1)
    size = windows.shape[-1]
    middle: Floats = (ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2
    return middle


def robust_scale(windows: Floats, *, floor: float = SCALE_FLOOR) -> Floats:
    """Median absolute deviation as a Gaussian sigma, [...] of windows [..., n]; at least floor."""
    center = median(windows)
    deviation = median(np.abs(windows - center[..., np.newaxis]))
    scale: Floats = np.maximum(MAD_TO_SIGMA * deviation, floor)
    return scale


def without_spikes(logs: Floats, sigma: float | None = None) -> Floats:
    """The series with runs of one or two outliers replaced by the median around them.

    logs: [n]. sigma: of their noise; None: by `step_proof_scale`. A Hampel filter (Hampel 1974):
    window 5, limit SPIKE_SIGMAS. The ends repeat the last full window, so a level needs three
    values to count as one.
    """
    if logs.size < _SPIKE_WINDOW:
        return logs
    half = _SPIKE_WINDOW // 2
    around = np.empty_like(logs)
    around[half:-half] = median(sliding_window_view(logs, _SPIKE_WINDOW))
    around[:half], around[-half:] = around[half], around[-half - 1]
    limit = SPIKE_SIGMAS * (step_proof_scale(logs) if sigma is None else sigma)
    cleaned: Floats = np.where(np.abs(logs - around) > limit, around, logs)
    return cleaned


def resolution_scale(values: Floats) -> float:
    """Sigma of rounding, estimated from the smallest difference of values [n].

    The uniform error of one tick has its width over sqrt(12). 0 unless values recur often: a few
    steady levels show the distance of levels, and no tick.
    """
    same = SAME_VALUE * float(np.abs(values).max())
    ticks = differences(np.sort(values))
    ticks = ticks[ticks > same]
    runs = 1 + int(np.count_nonzero(np.abs(differences(values)) > same))
    if not ticks.size or runs <= _RETURNS * (ticks.size + 1):
        return 0.0
    return float(ticks.min()) / float(np.sqrt(12))


def difference_scale(logs: Floats, *, floor: float = SCALE_FLOOR / 2) -> float:
    """Sigma of independent noise from differences of neighbours, including ticks and modes.

    The larger of two estimates: the median absolute difference, and the root mean square without
    the largest tenth. If most neighbours are equal, the median is 0 although there is noise.
    """
    moved = np.sort(np.abs(differences(logs)))
    if moved.size < 3:
        return floor
    # Even a short series may have a step, and a spell with two more jumps.
    kept = moved[: moved.size - max(moved.size // 10, min(3, moved.size // 4))]
    middle = MAD_TO_SIGMA * float(moved[moved.size // 2])
    trimmed = _TRIMMED_TO_SIGMA * float(np.sqrt(mean(kept * kept)))
    return max(middle, trimmed, floor * float(np.sqrt(2))) / float(np.sqrt(2))


def step_proof_scale(logs: Floats, *, floor: float = SCALE_FLOOR / 2) -> float:
    """Sigma of independent noise from differences of neighbours, robust to a few steps."""
    if logs.size < 3:
        return floor
    return float(robust_scale(differences(logs), floor=floor * np.sqrt(2))) / float(np.sqrt(2))


def step_proof_autocorrelation(logs: Floats, *, floor: float = SCALE_FLOOR / 2) -> float:
    """Lag-1 autocorrelation phi of AR(1) noise, in [0, 0.8], from differences of neighbours.

    Their own lag-1 correlation is -(1 - phi)/2, and a few steps hardly affect it once differences
    are clipped. Its standard error is 1.4/sqrt(n).
    """
    difference = differences(logs)
    if difference.size < 3:
        return 0.0
    limit = 3 * float(robust_scale(difference, floor=2 * floor))
    difference = np.clip(difference, -limit, limit)
    power = float(difference @ difference)
    if power == 0:
        return 0.0
    phi = 1 + 2 * float(difference[1:] @ difference[:-1]) / power
    return min(max(phi, 0.0), MAX_AUTOCORRELATION)


def autocorrelation(residuals: Floats, *, levels: int) -> float:
    """Lag-1 autocorrelation of residuals about `levels` fitted means, in [0, 0.8].

    Every fitted mean biases the plain estimate by about -1/n; that is added back.
    """
    power = float(residuals @ residuals)
    if residuals.size < 3 or power == 0:
        return 0.0
    phi = float(residuals[1:] @ residuals[:-1]) / power + levels / residuals.size
    return min(max(phi, 0.0), MAX_AUTOCORRELATION)


def effective_size(size: Floats | int, memory: float) -> Floats:
    """Number of independent values whose mean is as precise as that of `size` with AR(1) memory."""
    shared = 2 * memory * (1 - memory**size) / (size * (1 - memory) ** 2)
    independent: Floats = size / np.maximum((1 + memory) / (1 - memory) - shared, 1.0)
    return independent
