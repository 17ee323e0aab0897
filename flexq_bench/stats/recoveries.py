"""Jumps that fade: a level that returns to its old value over a few values."""

from __future__ import annotations

import numpy as np

from flexq_bench.stats.log_series import Floats, difference_scale

Excursion = tuple[int, int, float]  # start, stop, and size of the jump
LONGEST_RECOVERY = 25  # values
_SHORTEST = 3
_BEFORE = 7  # values from which the level before is estimated
_JUMP_SIGMAS = 6.0
_BACK_SIGMAS = 1.5  # of the median of three values, for a level that has returned
_FADED = 0.6  # mean of the second half of a recovery, at most, relative to the first half
_FADED_AFTER_FIRST = 0.8  # the same without the first value, which may be an outlier
_SLOPE_SIGMAS = 3.5
_SLOPE_SHARE = 0.3  # least share of a jump that has faded over the values so far
_SLOPE_SHARE_AFTER_FIRST = 0.12


def find_recoveries(values: Floats) -> list[Excursion]:
    """(start, stop, jump) of each recovery, oldest first, in values [n]; the level is back at stop.

    Hot machines, and caches that fill again, cause such values; code does not.
    """
    sigma = difference_scale(values, floor=0.0)
    moved = np.diff(values)
    found: list[Excursion] = []
    free, level = 0, 0.0
    for at in (np.flatnonzero(np.abs(moved) > _JUMP_SIGMAS * sigma) + 1).tolist():
        if at < max(free, _SHORTEST) or at + _SHORTEST > values.size:
            continue
        if at - free >= _SHORTEST:  # otherwise the level is the one before the previous jump
            level = float(np.median(values[max(free, at - _BEFORE) : at]))
        sign = 1.0 if moved[at - 1] > 0 else -1.0
        above = sign * (values[at : at + LONGEST_RECOVERY + _SHORTEST] - level)
        length = _length(above.tolist(), sigma)
        if length and _is_fading(above[:length]):
            free = at + length
            found.append((at, free, sign * float(above[0])))
    return found


def _length(above: list[float], sigma: float) -> int:
    """Number of values until three in a row are back, by their median; 0: too few, or never."""
    limit = _BACK_SIGMAS * sigma
    if above[0] < _JUMP_SIGMAS * sigma - limit:
        return 0
    for at in range(len(above) - _SHORTEST + 1):
        if sorted(above[at : at + 3])[1] <= limit:
            return at if at >= _SHORTEST else 0
    return 0


def _is_fading(above: Floats) -> bool:
    return _share_of_first_half(above) < _FADED and (
        _share_of_first_half(above[1:]) < _FADED_AFTER_FIRST
    )


def _share_of_first_half(values: Floats) -> float:
    """Mean of the second half of values [n >= 2], divided by that of the first."""
    half = values.size // 2
    first = float(values[:half].mean())
    return float(values[half:].mean()) / first if first > 0 else float("inf")


def without_recoveries(values: Floats, recoveries: list[Excursion]) -> Floats:
    """Values [n], with each recovery replaced by the median of the values before it."""
    if not recoveries:
        return values
    cleaned = values.copy()
    for start, stop, _ in recoveries:
        cleaned[start:stop] = float(np.median(cleaned[max(0, start - _BEFORE) : start]))
    return cleaned


def falls_back(values: Floats, before: float, jump: float, sigma: float) -> bool:
    """Return True if values [n >= 3] after a jump return towards the level before it.

    They must do so without the first value too, which may be an outlier at the step. sigma: of one
    value. before: the level at which the jump started. True also if fewer than 3 values follow the
    jump.
    """
    sign = float(np.sign(jump))
    if sign * (values[0] - before) < abs(jump) / 2:  # the jump is one value later
        values = values[1:]
    if values.size < _SHORTEST:
        return True
    back = -sign * values
    slope, error = _slope(back, sigma)
    rest, _ = _slope(back[1:], sigma)
    fall = slope * (values.size - 1)
    after_first = rest * (values.size - 2)
    return (
        slope > _SLOPE_SIGMAS * error
        and fall > _SLOPE_SHARE * abs(jump)
        and after_first > _SLOPE_SHARE_AFTER_FIRST * abs(jump)
    )


def _slope(values: Floats, sigma: float) -> tuple[float, float]:
    """Slope of a straight line through values [n >= 2], and its standard error."""
    time = np.arange(values.size) - (values.size - 1) / 2
    spread = float(time @ time)
    return float(time @ values) / spread, sigma / float(np.sqrt(spread))
