"""A pattern that comes back every so many values: nights of a week, months of a year."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexq_bench.stats.log_series import MAD_TO_SIGMA, Floats, Ints

WEEK = 7  # nights
# Quarters and months of a year, days of a week, hours of a day, weeks of a year.
CALENDAR = (4, WEEK, 12, 24, 52)
_FEWEST_PERIODS = 6
# Of the medians of all places in their standard errors, the sum of squares, as a Gaussian deviation
# (Wilson and Hilferty 1931): chance makes as much once in a million.
_LEAST_EVIDENCE = 4.776
_LEAST_AGREEMENT = 0.8  # correlation of the patterns of both halves
_ERROR_OF_MEDIAN = 1.2533  # of a Gaussian, over that of a mean


@dataclass(frozen=True, slots=True)
class Season:
    """owed: [n] what each value is above the mean of its period, by its place in it.

    period: in values, the longest that was found.
    """

    owed: Floats
    period: int

    @property
    def depth(self) -> float:
        """From the lowest place to the highest."""
        return float(np.ptp(self.owed))


def find_season(values: Floats, index: Ints, periods: tuple[int, ...]) -> Season | None:
    """Patterns of the given periods together, the shortest first; None: there is none.

    values: [n], index: [n] where they are in time. Told by what values are above the mean of the
    period about them, which a level and a drift are no part of, and seen alike in both halves of
    the series. A longer period has to explain what a shorter one left over.
    """
    owed, longest = np.zeros(values.size), 0
    for period in sorted(periods):
        offsets = _pattern(values - owed, index, period)
        if offsets is not None:
            owed, longest = owed + offsets[index % period], period
    return Season(owed, longest) if longest else None


def _pattern(values: Floats, index: Ints, period: int) -> Floats | None:
    """What each place of a period is above their mean, [period]; None: not clear enough."""
    if values.size < _FEWEST_PERIODS * period:
        return None
    half = period // 2
    # Around an even number of values: the outermost two count half.
    weights = np.ones(2 * half + 1)
    if period % 2 == 0:
        weights[[0, -1]] = 0.5
    means = np.convolve(values, weights / period, "valid")
    above, places = values[half:-half] - means, index[half:-half] % period
    middle = above.size // 2
    first = _medians(above[:middle], places[:middle], period)
    second = _medians(above[middle:], places[middle:], period)
    pattern = _medians(above, places, period)
    if first is None or second is None or pattern is None:
        return None
    spread = float(np.sqrt((first @ first) * (second @ second)))
    if not spread or float(first @ second) < _LEAST_AGREEMENT * spread:
        return None
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(above - pattern[places])))
    error = _ERROR_OF_MEDIAN * sigma / float(np.sqrt(above.size / period))
    if error and _deviation(float(pattern @ pattern) / error**2, period - 1) < _LEAST_EVIDENCE:
        return None
    return pattern


def _deviation(square: float, freedom: int) -> float:
    """A sum of squares of `freedom` Gaussians as a standard Gaussian that is as far out."""
    width = 2 / (9 * freedom)
    return float(((square / freedom) ** (1 / 3) - 1 + width) / np.sqrt(width))


def _medians(above: Floats, places: Ints, period: int) -> Floats | None:
    """[period] of each place, about their mean; None: a place has no values."""
    by_place = [above[places == place] for place in range(period)]
    if not all(part.size for part in by_place):
        return None
    medians = np.array([float(np.median(part)) for part in by_place])
    centered: Floats = medians - medians.mean()
    return centered
