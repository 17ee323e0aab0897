"""Detectors of others with their defaults: indices of the changes of a series."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flexq_bench.stats import change_points

Floats = NDArray[np.float64]
Detector = Callable[[Floats], list[int]]

_WINDOW = 12  # Perfherder's: values before and after
_T = 7.0


def ours(values: Floats) -> list[int]:
    return [point.index for point in change_points(values)]


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
    """Student's t of 12 values before and 12 after, local maxima of 7 or more."""
    size = values.size
    if size < 2 * _WINDOW:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(values, _WINDOW)
    means, variances = windows.mean(axis=1), windows.var(axis=1, ddof=1)
    gap = np.abs(means[_WINDOW:] - means[:-_WINDOW])
    error = np.sqrt((variances[_WINDOW:] + variances[:-_WINDOW]) / _WINDOW)
    t = gap / np.maximum(error, 1e-12 + 1e-4 * np.abs(means[_WINDOW:]))
    found: list[int] = []
    for at in np.argsort(-t):
        if t[at] < _T:
            break
        if all(abs(int(at) + _WINDOW - other) >= _WINDOW for other in found):
            found.append(int(at) + _WINDOW)
    return sorted(found)


def otava(values: Floats) -> list[int]:
    """apache-otava's change points: windows of 50, p 0.001, any size (its defaults)."""
    from otava.analysis import compute_change_points  # type: ignore[import-not-found]

    found, _ = compute_change_points(values.tolist(), window_len=50, max_pvalue=0.001)
    return [int(point.index) for point in found]


DETECTORS: dict[str, Detector] = {
    "level model": ours,
    "windowed t-test": windowed_t,
    "apache-otava": otava,
    "ruptures KernelCPD (PELT, l2, BIC)": kernel_pelt,
}
