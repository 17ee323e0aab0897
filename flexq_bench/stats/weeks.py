"""A pattern that comes back every seven values: nights of a week."""

from __future__ import annotations

import numpy as np

from flexq_bench.stats.log_series import MAD_TO_SIGMA, Floats, Ints

DAYS = 7
_FEWEST_WEEKS = 6
# Of the days' medians in their standard errors, the sum of squares: chance makes 40 of 6 degrees of
# freedom once in a million.
_LEAST_EVIDENCE = 40.0
_LEAST_AGREEMENT = 0.8  # correlation of the patterns of both halves
_ERROR_OF_MEDIAN = 1.2533  # of a Gaussian, over that of a mean


def weekly_pattern(values: Floats, index: Ints) -> Floats | None:
    """What each day of seven is above their mean, [7] by index modulo 7; None: no such pattern.

    values: [n], index: [n] their nights. Told by what values are above the mean of the seven about
    them, which a level and a drift are no part of, and seen alike in both halves of the series.
    """
    if values.size < _FEWEST_WEEKS * DAYS:
        return None
    half = DAYS // 2
    means = np.convolve(values, np.full(DAYS, 1 / DAYS), "valid")
    above, days = values[half:-half] - means, index[half:-half] % DAYS
    middle = above.size // 2
    first, second = _medians(above[:middle], days[:middle]), _medians(above[middle:], days[middle:])
    pattern = _medians(above, days)
    if first is None or second is None or pattern is None:
        return None
    spread = float(np.sqrt((first @ first) * (second @ second)))
    if not spread or float(first @ second) < _LEAST_AGREEMENT * spread:
        return None
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(above - pattern[days])))
    error = _ERROR_OF_MEDIAN * sigma / float(np.sqrt(above.size / DAYS))
    if float(pattern @ pattern) < _LEAST_EVIDENCE * error * error:
        return None
    return pattern


def _medians(above: Floats, days: Ints) -> Floats | None:
    """[7] of each day, about their mean; None: a day has no values."""
    by_day = [above[days == day] for day in range(DAYS)]
    if not all(part.size for part in by_day):
        return None
    medians = np.array([float(np.median(part)) for part in by_day])
    centered: Floats = medians - medians.mean()
    return centered
