"""Commonly used simple alert rules for the newest result, on logarithms of many series at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
LONGEST = 64


def fixed(windows: Floats, latest: Floats) -> Bools:
    """5 % away from the night before."""
    is_far: Bools = np.abs(latest - windows[..., -1]) > np.log(1.05)
    return is_far


def t_test(windows: Floats, latest: Floats) -> Bools:
    """Outside of the two-sided 99 % prediction interval of the last 64 nights."""
    reach = stats.t.ppf(0.995, LONGEST - 1) * np.sqrt(1 + 1 / LONGEST)
    is_external_series: Bools = np.abs(latest - windows.mean(axis=-1)) > reach * windows.std(
        axis=-1, ddof=1
    )
    return is_external_series


def quartiles(windows: Floats, latest: Floats) -> Bools:
    """More than 3 interquartile ranges outside of the quartiles of the last 64 nights."""
    low, high = np.quantile(windows, (0.25, 0.75), axis=-1)
    reach = 3 * (high - low)
    is_external_series: Bools = (latest < low - reach) | (latest > high + reach)
    return is_external_series


SIMPLE: dict[str, Callable[[Floats, Floats], Bools]] = {
    "fixed 5 %": fixed,
    "t-test 0.99 over 64": t_test,
    "3·IQR": quartiles,
}
