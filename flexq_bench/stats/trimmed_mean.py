"""Trimmed mean and its interval."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from flexq_bench.stats.bootstrap import Interval


def trimmed_mean(values: ArrayLike, *, trim: float) -> float:
    """Mean of values without the fraction `trim` at each end.

    values: [n] in any unit, finite. Result: in the same unit. The number left out at each end is
    trim · n, rounded (half up), so few values are all averaged. Raises ValueError if there is no
    value, one is not finite, or trim is not in [0, 0.25].
    """
    ordered, left_out = _sorted(values, trim)
    return float(ordered[left_out : ordered.size - left_out].mean())


def trimmed_mean_interval(values: ArrayLike, *, trim: float, confidence: float = 0.95) -> Interval:
    """The trimmed mean of independent values, and its interval.

    values, trim: as of trimmed_mean; at least two values. The interval is Student's, with the
    winsorized standard deviation and the degrees of freedom of the values that are averaged (Tukey
    and McLaughlin 1963). Raises ValueError as trimmed_mean, if there are fewer than two values, or
    if confidence is not in (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    ordered, left_out = _sorted(values, trim)
    n = ordered.size
    if n < 2:
        raise ValueError("an interval of a mean needs two values or more")
    kept = n - 2 * left_out
    estimate = float(ordered[left_out : n - left_out].mean())
    winsorized = ordered.clip(ordered[left_out], ordered[n - left_out - 1])
    squares = float(np.square(winsorized - winsorized.mean()).sum())
    factor = float(special.stdtrit(kept - 1, (1 + confidence) / 2))
    half_width = factor * math.sqrt(squares / (kept * (kept - 1)))
    return Interval(estimate, estimate - half_width, estimate + half_width)


def _sorted(values: ArrayLike, trim: float) -> tuple[NDArray[np.float64], int]:
    """Sorted values, and the number left out at each end."""
    if not 0 <= trim <= 0.25:
        raise ValueError(f"trim must be between 0 and 0.25, got {trim}")
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if ordered.ndim != 1 or ordered.size == 0:
        raise ValueError("a mean needs a value or more, in one dimension")
    if not np.isfinite(ordered).all():
        raise ValueError("values must be finite: find out where NaN or infinity came from")
    return ordered, math.floor(trim * ordered.size + 0.5)
