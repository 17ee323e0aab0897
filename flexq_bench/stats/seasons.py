"""Seasonal component of a series: days of a week, months of a year."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexq_bench.stats.log_series import MAD_TO_SIGMA, Floats, Ints

WEEK = 7  # nights
# Quarters and months of a year, days of a week, hours of a day, weeks of a year.
CALENDAR = (4, WEEK, 12, 24, 52)
_FEWEST_PERIODS = 6
# Least sum of squares of the medians of all phases in their standard errors, as a Gaussian deviate
# (Wilson and Hilferty 1931): chance exceeds it once in a million.
_LEAST_EVIDENCE = 4.776
_LEAST_AGREEMENT = 0.8  # correlation of the patterns of both halves
_ERROR_OF_MEDIAN = 1.2533  # of a Gaussian, relative to that of a mean


@dataclass(frozen=True, slots=True)
class Season:
    """component: [n] offset of each value from the mean of its period, by its phase.

    period: the longest one, in values.
    """

    component: Floats
    period: int

    @property
    def depth(self) -> float:
        """Range from the lowest phase to the highest."""
        return float(np.ptp(self.component))


def find_season(values: Floats, index: Ints, periods: tuple[int, ...]) -> Season | None:
    """Estimate the sum of the seasonal components of these periods; None if none is significant.

    values: [n], index: [n] their positions in time. Components are estimated from deviations from
    the centered moving average of one period, which removes levels and drifts. Both halves of the
    series must agree. A longer period is fitted to the residuals of the shorter ones.
    """
    component, longest = np.zeros(values.size), 0
    for period in sorted(periods):
        offsets = _offsets(values - component, index, period)
        if offsets is not None:
            component, longest = component + offsets[index % period], period
    return Season(component, longest) if longest else None


def _offsets(values: Floats, index: Ints, period: int) -> Floats | None:
    """Offsets of the phases of a period, [period]; None if they are not significant."""
    if values.size < _FEWEST_PERIODS * period:
        return None
    half = period // 2
    # For an even number of values the outermost two count half.
    weights = np.ones(2 * half + 1)
    if period % 2 == 0:
        weights[[0, -1]] = 0.5
    means = np.convolve(values, weights / period, "valid")
    above, phases = values[half:-half] - means, index[half:-half] % period
    middle = above.size // 2
    first = _medians(above[:middle], phases[:middle], period)
    second = _medians(above[middle:], phases[middle:], period)
    pattern = _medians(above, phases, period)
    if first is None or second is None or pattern is None:
        return None
    spread = float(np.sqrt((first @ first) * (second @ second)))
    if not spread or float(first @ second) < _LEAST_AGREEMENT * spread:
        return None
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(above - pattern[phases])))
    error = _ERROR_OF_MEDIAN * sigma / float(np.sqrt(above.size / period))
    if error and _deviation(float(pattern @ pattern) / error**2, period - 1) < _LEAST_EVIDENCE:
        return None
    return pattern


def _deviation(square: float, freedom: int) -> float:
    """Standard normal deviate of a chi-squared value."""
    width = 2 / (9 * freedom)
    return float(((square / freedom) ** (1 / 3) - 1 + width) / np.sqrt(width))


def _medians(above: Floats, phases: Ints, period: int) -> Floats | None:
    """Medians by phase, [period], minus their mean; None if a phase has no values."""
    by_phase = [above[phases == phase] for phase in range(period)]
    if not all(part.size for part in by_phase):
        return None
    medians = np.array([float(np.median(part)) for part in by_phase])
    centered: Floats = medians - medians.mean()
    return centered
