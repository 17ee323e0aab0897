"""Bootstrap confidence intervals of a median, with and without a random effect of placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_MAX_RESAMPLES = 2000
_MIN_RESAMPLES = 500
# placements drawn in one call: an interval of 150 placements takes less than 20 ms
_MAX_DRAWS = 60_000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval, in the unit of the data."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """The larger distance from the estimate to an end."""
        return max(self.high - self.estimate, self.estimate - self.low)

    def is_within(self, tolerance: float) -> bool:
        """Return True if both ends are within ±tolerance (a fraction) of the estimate."""
        return self.half_width <= tolerance * abs(self.estimate)


def median_interval(samples: ArrayLike, *, seed: int, confidence: float = 0.95) -> Interval:
    """Percentile bootstrap interval of the median of independent samples.

    samples: [n] in any unit, finite. Result: in the same unit.
    Efron and Tibshirani 1993, ch. 13; resampled medians are drawn as in `_bootstrap_medians`.
    Raises ValueError if there is no sample, one is not finite, or confidence is not in (0, 1).
    """
    return hierarchical_interval([samples], seed=seed, confidence=confidence)


def hierarchical_interval(
    placements: Sequence[ArrayLike], *, seed: int, confidence: float = 0.95
) -> Interval:
    """Bootstrap interval of the median over placements of each placement's median.

    placements: one array [samples] per placement, finite; lengths may differ. Result: same unit. A
    resample draws placements with replacement, then samples within each drawn placement (Davison
    and Hinkley 1997, section 3.8), so that differences of placements widen the interval as much as
    they move the estimate. With one placement this is the plain bootstrap. Raises ValueError if
    there is no placement, one is empty, a sample is not finite, or confidence is not in (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    if not placements:
        raise ValueError("an interval needs at least one placement")
    ordered = [np.sort(np.asarray(samples, dtype=np.float64)) for samples in placements]
    if any(samples.ndim != 1 or samples.size == 0 for samples in ordered):
        raise ValueError("each placement needs a one-dimensional array of at least one sample")
    if not all(np.isfinite(samples).all() for samples in ordered):
        raise ValueError("samples must be finite: find out where NaN or infinity came from")

    rng = np.random.default_rng(seed)
    resamples = max(_MIN_RESAMPLES, min(_MAX_RESAMPLES, _MAX_DRAWS // len(ordered)))
    chosen = rng.integers(len(ordered), size=(resamples, len(ordered)))
    resampled = np.median(_bootstrap_medians(ordered, chosen, rng), axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    estimate = float(np.median([np.median(samples) for samples in ordered]))
    return Interval(estimate, min(float(low), estimate), max(float(high), estimate))


def _bootstrap_medians(
    ordered: Sequence[Floats], chosen: NDArray[np.int64], rng: np.random.Generator
) -> Floats:
    """The median of one bootstrap resample of ordered[i] for every i in `chosen`.

    Resampling n sorted values is x[floor(n·U)] with n uniform U, which keeps order: the r-th
    smallest of the resample is x[floor(n·U_(r))], and U_(r) is Beta(r, n-r+1). Drawing U_(r) itself
    gives the same distribution as resampling, at a cost independent of n. Even n needs the two
    middle values, with U_(r+1) = U_(r) + (1 - U_(r))·Beta(1, n-r) (David and Nagaraja 2003,
    sections 2.3 and 2.5).
    """
    sizes = np.array([samples.size for samples in ordered])
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    values = np.concatenate(ordered)
    n, start = sizes[chosen], starts[chosen]
    rank = (n + 1) // 2
    lower = rng.beta(rank, n - rank + 1)
    # Odd n: the same value twice. The unused parameter must still be positive.
    upper = lower + (1 - lower) * rng.beta(1, np.maximum(n - rank, 1))
    upper = np.where(n % 2 == 0, upper, lower)
    low_index = np.minimum((n * lower).astype(np.int64), n - 1)
    high_index = np.minimum((n * upper).astype(np.int64), n - 1)
    medians: Floats = (values[start + low_index] + values[start + high_index]) / 2
    return medians
