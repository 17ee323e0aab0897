"""Other change point detectors with their defaults, for comparison."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flexq_bench.stats.change_points import change_points

Floats = NDArray[np.float64]
Detector = Callable[[Floats], list[int]]

_WINDOW_LENGTH = 12  # Perfherder's: values before and after
_MAX_LENGTH_BEFORE = 24
_MIN_T = 7.0


SMALLEST = 0.005  # of the series with known steps; those that people mark are larger


def ours(values: Floats) -> list[int]:
    return [point.index for point in change_points(values, in_hindsight=True)]


def ours_from(smallest: float) -> Detector:
    """Return ours for a reader who asks for all changes from a size on."""
    return lambda values: [
        point.index for point in change_points(values, smallest=smallest, in_hindsight=True)
    ]


def pelt(values: Floats) -> list[int]:
    """ruptures' PELT, l2, of the standardized series with the penalty of BIC, 2 ln n."""
    import ruptures

    spread = float(values.std())
    if spread == 0:
        return []
    scaled = ((values - values.mean()) / spread)[:, None]
    noise = float(np.median(np.abs(np.diff(scaled[:, 0])))) / 0.954
    penalty = 2 * max(noise, 1e-3) ** 2 * float(np.log(values.size))
    search = ruptures.Pelt(model="l2", min_size=2, jump=1).fit(scaled)
    return [int(end) for end in search.predict(pen=penalty)[:-1]]


def kernel_pelt(values: Floats) -> list[int]:
    """ruptures' PELT of a linear kernel, in C: the same segments as l2."""
    import ruptures

    noise = float(np.median(np.abs(np.diff(values)))) / 0.954 or 1.0
    search = ruptures.KernelCPD(kernel="linear", min_size=2).fit((values / noise)[:, None])
    return [int(end) for end in search.predict(pen=2 * float(np.log(values.size)))[:-1]]


def windowed_t(values: Floats) -> list[int]:
    """Perfherder's rule: local maxima above 7 of Student's t, 12 to 24 values before and 12 after.

    Means are weighted linearly. The window before grows with the values since t last exceeded 7.
    """
    size = values.size
    t = np.zeros(size)
    calm = 0
    for index in range(1, size):
        length = min(index, max(_WINDOW_LENGTH, min(_MAX_LENGTH_BEFORE, calm)))
        before, spread_before = _weighted(values[index - length : index][::-1])
        after, spread_after = _weighted(values[index : index + _WINDOW_LENGTH])
        error = float(np.sqrt(spread_before + spread_after))
        gap = abs(after - before)
        t[index] = (gap / error if error else np.inf) if gap else 0.0
        calm = 0 if t[index] > _MIN_T else calm + 1
    following = np.append(t[1:], 0.0)
    return [
        index
        for index in range(_WINDOW_LENGTH, size - _WINDOW_LENGTH + 1)
        if t[index] > _MIN_T and t[index] >= t[index - 1] and t[index] >= following[index]
    ]


def _weighted(window: Floats) -> tuple[float, float]:
    """Weighted mean of a window [n], nearest value first, and squared standard error about it."""
    size = window.size
    mean = float(np.average(window, weights=np.arange(size, 0, -1)))
    return mean, float(np.sum((window - mean) ** 2)) / max(size - 1, 1) / size


def otava(values: Floats) -> list[int]:
    """apache-otava's change points: windows of 50, p 0.001, any size (its defaults)."""
    from otava.analysis import compute_change_points  # type: ignore[import-not-found]

    points, _ = compute_change_points(values.tolist(), window_len=50, max_pvalue=0.001)
    return [int(point.index) for point in points]


DETECTORS: dict[str, Detector] = {
    "level model": ours,
    "windowed t-test": windowed_t,
    "apache-otava": otava,
    "ruptures KernelCPD (PELT, l2, BIC)": kernel_pelt,
}
