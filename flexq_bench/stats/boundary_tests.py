"""Tests of the boundaries of a fit: by Student's t, and against a straight line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy import special

from flexq_bench.stats.bends import ramps
from flexq_bench.stats.log_series import MAD_TO_SIGMA, Floats, effective_size, root_mean_square
from flexq_bench.stats.segments import Segment, Sums
from flexq_bench.stats.wander import Wander

SURROUNDINGS = 60  # values on either side of a step from which its noise is estimated
_SHARED = 8.0  # number of values by which the other side's variance contributes to that of a side
_NEW = 10  # values after the newest step, at most, for which the next two constants apply
_NOW = 15  # values before it
# factor by which recent noise must be larger; a smaller factor may be chance in so few values
_LOUDER = 2.0
_LINE_VARIANCE = 4.0  # of the end of a line, relative to that of a mean
# Variances by which a step must fit its surroundings better than a straight line.
BEYOND_A_LINE = 1.0
_SHORT = 5  # values of a side that cannot tell a step from a line
# Independent positions of a step whose shorter side has m of n values: n / m times this. Short
# sides have many positions, and a look every night adds new ones
# (benchmarks/verdicts/retrospective.py).
_TRIALS = 48.0


def jump(left: Segment, right: Segment) -> float:
    """Change of the level at the boundary of two segments."""
    at = right.start - 0.5
    return right.at(at) - left.at(at)


def innovations(residuals: Floats, memory: float) -> float:
    """Sum of squared AR(1) innovations."""
    return float(_powers(residuals) @ _of_memory(memory))


class BoundaryTests:
    """Tests of the boundaries between adjacent segments [k + 1] of a series.

    A test needs the values beside its boundary, and the memory of all values. The former is
    computed once: a removal changes only that of the two boundaries next to it.

    floor: smallest sigma of a value. lengths: of ramps that count as steps. most_counted: as
    `StepRules`'.
    """

    def __init__(
        self,
        sums: Sums,
        residuals: Floats,
        segments: Sequence[Segment],
        *,
        floor: float,
        lengths: tuple[int, ...],
        most_counted: float,
    ) -> None:
        self._sums, self._floor = sums, floor
        self._lengths, self._most_counted = lengths, most_counted
        both = [self._beside(residuals, *pair) for pair in pairwise(segments)]
        self._sides = np.array([sides for sides, _ in both]).reshape(-1, 8)
        self._lines = np.array([lines for _, lines in both]).reshape(-1, 1 + len(lengths), 3)

    @property
    def effects(self) -> Floats:
        """[k] jumps at the boundaries."""
        effects: Floats = self._sides[:, 0]
        return effects

    def remove(self, position: int, residuals: Floats, segments: Sequence[Segment]) -> None:
        """Remove a boundary; residuals and segments are those without it."""
        self._sides = np.delete(self._sides, position, axis=0)
        self._lines = np.delete(self._lines, position, axis=0)
        for at in (position - 1, position):
            if 0 <= at < len(segments) - 1:
                self._sides[at], self._lines[at] = self._beside(
                    residuals, segments[at], segments[at + 1]
                )

    def p_values(
        self,
        residuals: Floats,
        memory: float,
        wanders: Sequence[Wander],
        *,
        or_line: bool = True,
    ) -> Floats:
        """[k] probabilities of a jump as large anywhere in noise; 1 if a line fits as well.

        residuals: [n] of the series. memory: AR(1) coefficient. wanders: [k] of the boundaries.
        or_line: False: a line is no alternative.
        """
        effects, low, high, freedom, before, after, falls, rises = self._sides.T
        shortest = np.minimum(before, after)
        error = np.zeros_like(effects)
        for variance, size, slope in ((low, before, falls), (high, after, rises)):
            independent = effective_size(size, memory)
            counted = np.minimum(independent, self._most_counted)
            error += variance * np.where(slope, _LINE_VARIANCE / independent, 1 / counted)
        if any(one.sizes for one in wanders):
            sigma = root_mean_square(residuals, floor=self._floor)
            error += [
                one.variance(int(size), memory, sigma)
                for one, size in zip(wanders, shortest, strict=True)
            ]
        p_values = 2 * special.stdtr(freedom, -np.abs(effects) / np.sqrt(error))
        p_values = np.minimum(p_values * _TRIALS * self._sums.size / shortest, 1.0)
        if or_line:
            # Variance of the innovations of an AR(1) process.
            least = BEYOND_A_LINE * np.maximum(low, high) * (1 - memory * memory)
            better = (self._lines @ _of_memory(memory) >= least[:, None]).any(axis=1)
            p_values[~better & (falls == 0) & (rises == 0) & (shortest > _SHORT)] = 1.0
        tested: Floats = p_values
        return tested

    def _beside(
        self, residuals: Floats, left: Segment, right: Segment
    ) -> tuple[tuple[float, ...], Floats]:
        """Numbers of a boundary's sides, and powers that a line and ramps have beyond a step."""
        at = right.start
        before = residuals[max(left.start, at - SURROUNDINGS) : at]
        after = residuals[at : min(right.stop, at + SURROUNDINGS)]
        squares = float(before @ before), float(after @ after)
        sizes = before.size, after.size
        freedom = max(sizes[0] + sizes[1] - 2, 1)
        pooled = (squares[0] + squares[1]) / freedom
        variances = [
            max((square + _SHARED * pooled) / (size - 1 + _SHARED), self._floor * self._floor)
            for square, size in zip(squares, sizes, strict=True)
        ]
        if right.stop == self._sums.size and right.size <= _NEW:
            # Only few values follow, so the noise is also estimated from the last ones before the
            # step.
            now = float(np.median(np.abs(before[-_NOW:]))) * MAD_TO_SIGMA / _LOUDER
            variances = [max(variance, now * now) for variance in variances]
        effect = jump(left, right)
        sides = (effect, *variances, freedom, left.size, right.size, left.slope, right.slope)
        lines = np.zeros((1 + len(self._lengths), 3))
        if not (left.slope or right.slope) and min(left.size, right.size) > _SHORT:
            about = residuals[left.start : right.stop]
            line = self._sums.fit(left.start, right.stop, 0.0)
            about_line = about + (left.level - line.level)
            about_line[left.size :] += right.level - left.level
            about_line -= line.slope * np.arange(about_line.size)
            others = [about]
            others += [about - one for one in ramps(left.size, right.size, effect, self._lengths)]
            lines[:] = _powers(about_line) - np.array([_powers(one) for one in others])
        return sides, lines


def _powers(residuals: Floats) -> Floats:
    """Sums of products of neighbours, whose product with `_of_memory` is that of innovations."""
    now, last = residuals[1:], residuals[:-1]
    return np.array([now @ now, now @ last, last @ last])


def _of_memory(memory: float) -> Floats:
    return np.array([1.0, -2 * memory, memory * memory])
