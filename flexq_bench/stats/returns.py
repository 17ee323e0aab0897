"""Levels that recur: any number of modes, sawtooth patterns, and the newest step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flexq_bench.stats.log_series import Floats, difference_scale
from flexq_bench.stats.modes import FEWEST_HOPS, LONGEST_VISIT
from flexq_bench.stats.recoveries import falls_back
from flexq_bench.stats.segments import SHORTEST_SEGMENT, Segment
from flexq_bench.stats.steps import Fit

_SAME_SIGMAS = 3.0  # largest difference of two visits of one level, in standard errors
_SAME_SHARE = 0.25  # the same, as a fraction of a usual step
_GRADUAL = 0.5  # share of a jump that a ramp must reverse
# jumps on either side whose levels must enclose those of the other jumps of a sawtooth
_NEIGHBOURS = 3
_FADING = 15  # values after a jump during which it may be the start of a recovery


@dataclass(frozen=True, slots=True)
class Returns:
    """Positions of steps [of a fit's boundaries] that do not count as steps.

    switches: between levels that recur. waiting: the newest ones, which later values will decide.
    """

    switches: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Values [start:stop] between two steps; level: their mean, None: a line."""

    start: int
    stop: int
    level: float | None

    @property
    def size(self) -> int:
        return self.stop - self.start


def find_returns(values: Floats, fit: Fit, steps: list[int]) -> Returns:
    """Find the steps of a fit of values [n] that return to an earlier level, by their positions.

    Five or more steps from levels that recur later, or to levels that occurred before, are
    switches, for any number of levels, if the median visit is no longer than 25 values. The newest
    step waits while all values after it fall back, for 15 values at most, and for 25 values if it
    repeats a hop that was reversed.
    """
    if not steps:
        return Returns()
    stretches = _stretches(fit, steps)
    effects = [fit.boundaries[at].effect for at in steps]
    switches, repeats = _recurring(fit, effects, stretches)
    waiting = set(range(_first_fading(values, fit, steps), len(steps)))
    if repeats:
        waiting.add(len(steps) - 1)
    return Returns(tuple(steps[at] for at in switches), tuple(steps[at] for at in sorted(waiting)))


def find_sawtooth(fit: Fit, steps: list[int]) -> tuple[int, ...]:
    """Positions of the steps of a fit that belong to a sawtooth: jumps followed by ramps back.

    A sawtooth has at least five jumps in one direction, after each of which at least half of the
    jump is reversed gradually before the next one. It also includes other jumps that are reversed
    before the next one, the newest jump if it is between the same levels, and further jumps in this
    direction between the levels of the nearest ones.
    """
    if len(steps) < FEWEST_HOPS:
        return ()
    effects = np.array([fit.boundaries[at].effect for at in steps])
    beside = [fit.boundaries[at].index - 0.5 for at in steps]
    before = [fit.segments[at].at(x) for at, x in zip(steps, beside, strict=True)]
    after = [fit.segments[at + 1].at(x) for at, x in zip(steps, beside, strict=True)]
    jumps = np.flatnonzero(np.sign(effects) == np.sign(np.median(np.sign(effects))))
    if jumps.size < FEWEST_HOPS:
        return ()
    same = float(np.median(np.abs(effects[jumps]))) / 2
    reverted = [(at, to) for at, to in pairwise(jumps) if abs(before[to] - before[at]) <= same]
    gradual = [
        at
        for at, to in reverted
        if (after[at] - before[to] + effects[at + 1 : to].sum()) / effects[at] >= _GRADUAL
    ]
    if len(gradual) < FEWEST_HOPS:
        return ()
    found = [position for at, to in reverted for position in range(at, to)]

    def is_within(at: int, teeth: list[int], beyond: float) -> bool:
        levels = [level for tooth in teeth for level in (before[tooth], after[tooth])]
        ends = before[at], after[at]
        return min(levels) - beyond <= min(ends) and max(ends) <= max(levels) + beyond

    teeth = [int(at) for at, _ in reverted]
    newest = range(int(jumps[-1]), len(steps))
    if all(is_within(at, teeth, same) for at in newest):
        found += newest
    # If the jump after it was missed, the level before it is not that of the next jump. A lasting
    # step is not between the levels of its neighbours on either side.
    for at in set(jumps.tolist()) - set(found):
        sides = (
            [one for one in teeth if one < at][-_NEIGHBOURS:],
            [one for one in teeth if one > at][:_NEIGHBOURS],
        )
        if abs(effects[at]) >= same and all(is_within(at, one, same / 2) for one in sides if one):
            found.append(at)
    return tuple(steps[at] for at in sorted(found))


def _stretches(fit: Fit, steps: list[int]) -> list[_Stretch]:
    cuts = [0, *(at + 1 for at in steps), len(fit.segments)]
    return [_stretch(fit.segments[low:high]) for low, high in pairwise(cuts)]


def _stretch(parts: tuple[Segment, ...]) -> _Stretch:
    start, stop = parts[0].start, parts[-1].stop
    if any(one.slope for one in parts):
        return _Stretch(start, stop, None)
    return _Stretch(start, stop, sum(one.mean * one.size for one in parts) / (stop - start))


def _recurring(fit: Fit, effects: list[float], stretches: list[_Stretch]) -> tuple[list[int], bool]:
    """Steps between recurring levels, and whether the newest one repeats a hop."""
    count = len(stretches)
    if count < 4:
        return [], False
    usual = _SAME_SHARE * float(np.median(np.abs(effects)))
    error = _SAME_SIGMAS * fit.sigma * float(np.sqrt((1 + fit.memory) / (1 - fit.memory)))

    levels = np.array([np.nan if one.level is None else one.level for one in stretches])
    sizes = np.array([one.size for one in stretches])
    inverse = 1 / sizes
    same = np.abs(np.subtract.outer(levels, levels)) <= np.minimum(
        usual, error * np.sqrt(np.add.outer(inverse, inverse))
    )
    np.fill_diagonal(same, val=False)
    # Levels from before a change of all levels do not recur. The level between the two steps of a
    # revert does not recur either.
    recurring = same.any(axis=0)
    switches = [
        at
        for at in range(count - 1)
        if recurring[at]
        and recurring[at + 1]
        and (same[:at, at + 1].any() or same[at + 2 :, at].any())
    ]
    visits = sizes[list({*switches, *(at + 1 for at in switches)})]
    if len(switches) < FEWEST_HOPS or float(np.median(visits)) > LONGEST_VISIT:
        switches = []
    short = sizes <= LONGEST_VISIT
    repeats = short[-1] and (same[1:-2, -1] & short[1:-2]).any() and same[:-3, -2].any()
    return switches, bool(repeats)


def _first_fading(values: Floats, fit: Fit, steps: list[int]) -> int:
    """Position of the first of the newest steps that may be a recovery; their number if none may.

    Its values must fall back from the start, so that a confirmed step is not questioned again.
    """
    sigma = difference_scale(values)
    for at, position in enumerate(steps):
        jump = fit.boundaries[position]
        after = values[jump.index :]
        before = fit.segments[position].at(jump.index - 0.5)
        if after.size <= _FADING and all(
            falls_back(after[:size], before, jump.effect, sigma)
            for size in range(SHORTEST_SEGMENT, after.size + 1)
        ):
            return at
    return len(steps)
