"""Interval of a trimmed mean."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from flexq_bench.stats.bootstrap import Interval


def trimmed_mean_interval(values: ArrayLike, *, trim: float, confidence: float = 0.95) -> Interval:
    """Mean of independent values without the fraction `trim` at each end, and its interval.

    values: [n] in any unit, finite. Result: in the same unit. The number left out at each end is
    trim · n, rounded (half up), so few values are all averaged. The interval is Student's, with the
    winsorized standard deviation and the degrees of freedom of the values that are averaged (Tukey
    and McLaughlin 1963). Raises ValueError if there are fewer than two values, one is not finite,
    trim is not in [0, 0.25], or confidence is not in (0, 1).
    """
    if not 0 <= trim <= 0.25:
        raise ValueError(f"trim must be between 0 and 0.25, got {trim}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if ordered.ndim != 1 or ordered.size < 2:
        raise ValueError("an interval of a mean needs two values or more, in one dimension")
    if not np.isfinite(ordered).all():
        raise ValueError("values must be finite: find out where NaN or infinity came from")
    n = ordered.size
    left_out = math.floor(trim * n + 0.5)
    kept = n - 2 * left_out
    estimate = float(ordered[left_out : n - left_out].mean())
    winsorized = ordered.clip(ordered[left_out], ordered[n - left_out - 1])
    squares = float(np.square(winsorized - winsorized.mean()).sum())
    factor = float(special.stdtrit(kept - 1, (1 + confidence) / 2))
    half_width = factor * math.sqrt(squares / (kept * (kept - 1)))
    return Interval(estimate, estimate - half_width, estimate + half_width)
