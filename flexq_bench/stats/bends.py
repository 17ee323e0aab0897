"""Gradual changes that resemble a step: a bend of a line, a level that settles, a slow ramp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flexq_bench.stats.log_series import MAD_TO_SIGMA, Floats, root_mean_square
from flexq_bench.stats.segments import Segment

CLIP_SIGMAS = 3.5  # limit for clipping a value
_BEYOND_A_BEND = 10.0  # variances by which a jump must be better than a bend
_BESIDE = 5  # values on either side of a step between lines
_LOCAL_SHARE = 1 / 3  # least share of the step that these values must show
_CLEARLY_LESS = 3.0  # standard errors
_SETTLED = 25  # values after a step in which its level may settle
# Time constants of settling, relative to the time until the level seems to change.
_SETTLING = np.array([0.25, 0.4, 0.6, 0.9, 1.4])
_SMALL_SIGMAS = 3.5  # of a step that a slow ramp may explain instead
_BEYOND_A_STEP = 4.0  # variances by which the ramp has to be better
_RAMPS = 7  # of a length, with their middles from one end of it to the other
_BESIDE_A_RAMP = 100  # values on either side that tell a ramp from a step
_BEND_REACH = 15  # values between a boundary and the bend that explains it instead


@dataclass(frozen=True, slots=True)
class SegmentFit:
    """Segments fitted to a series.

    values: [n]. segments: [k]. effects: [k - 1], of the boundaries between them. residuals: [n],
    from the segments. memory: of the residuals. floor: smallest sigma of a value.
    """

    values: Floats
    segments: list[Segment]
    effects: list[float]
    residuals: Floats
    memory: float
    floor: float

    @property
    def inflation(self) -> float:
        """Factor by which memory raises the variance of a mean."""
        return (1 + self.memory) / (1 - self.memory)


def is_gradual(fit: SegmentFit, position: int, slow: tuple[int, ...]) -> bool:
    """Return True if a gradual change explains a boundary of a fit as well as a step does.

    position: index of the segment before the boundary. slow: lengths, in values, of the ramps that
    may explain a small step.
    """
    return (
        _bends(fit, position)
        or _jumps_less(fit, position)
        or _settles(fit, position)
        or _is_slow(fit, position, slow)
    )


def ramps(before: int, after: int, effect: float, lengths: tuple[int, ...]) -> Iterator[Floats]:
    """Yield ramps of these lengths in place of a step, minus the step: [n].

    before, after: number of values on either side of the step.
    """
    time = np.arange(-before, after) + 0.5
    for length in lengths:
        yield effect * (np.clip(time / length + 0.5, 0, 1) - (time > 0))


def _bends(fit: SegmentFit, position: int) -> bool:
    """Return True if a continuous line with a bend explains the two segments as well as a jump."""
    left, right = fit.segments[position], fit.segments[position + 1]
    if not (left.slope or right.slope):
        return False
    about = fit.residuals[left.start : right.stop]
    # A few values that belong to the next step would make any fit a bad one.
    # About the segments and not their median, so that half of the values are usual ones even where
    # most of them are equal.
    scale = max(MAD_TO_SIGMA * float(np.median(np.abs(about))), fit.floor)
    usual = np.abs(about) <= CLIP_SIGMAS * scale
    part, about = fit.values[left.start : right.stop][usual], about[usual]
    jumping = float(about @ about)
    time = np.flatnonzero(usual).astype(np.float64)
    at = right.start - left.start
    knots = np.arange(max(at - _BEND_REACH, 1), min(at + _BEND_REACH, usual.size - 1) + 1, 2)
    if not knots.size:
        return False
    beyond = time - knots[:, None] if right.slope else knots[:, None] - time
    columns = [np.maximum(beyond, 0)]
    if left.slope and right.slope:
        columns.append(np.broadcast_to(time, beyond.shape))
    best = _least_rest(part, np.stack(columns, axis=1))
    return best - jumping < _BEYOND_A_BEND * fit.inflation * jumping / part.size


def _least_rest(values: Floats, designs: Floats) -> float:
    """Least residual sum of squares of values [n].

    Each fit has a constant and the rows of one of the designs [d, c, n].
    """
    designs = designs - designs.mean(axis=2, keepdims=True)
    about = values - values.mean()
    projected = designs @ about
    # A pseudoinverse, because the column of a bend after the last value is zero.
    inverse = np.linalg.pinv(designs @ designs.transpose(0, 2, 1), hermitian=True)
    saved = np.einsum("di,dij,dj->d", projected, inverse, projected)
    return float(about @ about - saved.max())


def _jumps_less(fit: SegmentFit, position: int) -> bool:
    """Return True if the values next to a step between lines jump by clearly less than the lines.

    A line that misses a bend ends too high or too low.
    """
    effect = fit.effects[position]
    left, right = fit.segments[position], fit.segments[position + 1]
    if not (left.slope or right.slope):
        return False
    size = min(_BESIDE, left.size, right.size)
    at = right.start
    jump = float(fit.values[at : at + size].mean() - fit.values[at - size : at].mean())
    jump -= (left.slope + right.slope) / 2 * size
    contrast = np.concatenate((np.full(size, -1 / size), np.full(size, 1 / size)))
    apart = np.abs(np.subtract.outer(np.arange(2 * size), np.arange(2 * size)))
    about = fit.residuals[left.start : right.stop]
    variance = max(float(about @ about) / about.size, fit.floor * fit.floor)
    variance *= float(contrast @ fit.memory**apart @ contrast)
    share = jump * float(np.sign(effect)) / abs(effect)
    return share < _LOCAL_SHARE and (1 - share) * abs(effect) > _CLEARLY_LESS * float(
        np.sqrt(variance)
    )


def _settles(fit: SegmentFit, position: int) -> bool:
    """Return True if the level after a larger step approaches the next one exponentially.

    A cache or a clock that warms up causes one step, not a second one at its end. A series may
    start with one.
    """
    left, right = fit.segments[position], fit.segments[position + 1]
    if left.size > _SETTLED or left.slope:
        return False
    if position and abs(fit.effects[position - 1]) < abs(fit.effects[position]):
        return False
    inside = fit.residuals[left.start : left.stop]
    towards_next = float(inside @ np.arange(left.size)) * fit.effects[position]
    if towards_next <= 0:
        return False
    stop = min(right.stop, right.start + max(_SETTLED, 2 * left.size))
    part = fit.values[left.start : stop]
    about = fit.residuals[left.start : stop]
    jumping = float(about @ about)
    fading = np.exp(-np.arange(part.size) / (left.size * _SETTLING[:, None]))
    fading -= fading.mean(axis=1, keepdims=True)
    rest = part - part.mean()
    saved = (fading @ rest) ** 2 / np.einsum("ij,ij->i", fading, fading)
    return float(rest @ rest - saved.max()) <= jumping


def _is_slow(fit: SegmentFit, position: int, slow: tuple[int, ...]) -> bool:
    """Return True if a ramp over so many values explains a small step clearly better than it.

    A level that wanders for a while leaves such steps. About a large one, further changes may be
    missing, which a ramp would explain as well.
    """
    left, right = fit.segments[position], fit.segments[position + 1]
    if left.slope or right.slope:
        return False
    sigma = root_mean_square(fit.residuals, floor=fit.floor)
    if abs(fit.effects[position]) > _SMALL_SIGMAS * sigma:
        return False
    start = max(left.start, left.stop - _BESIDE_A_RAMP)
    stop = min(right.stop, right.start + _BESIDE_A_RAMP)
    part, time = fit.values[start:stop], np.arange(start, stop) - right.start + 0.5
    middles = np.linspace(-0.5, 0.5, _RAMPS)[:, None]
    shapes = [
        np.clip(time / length - middles + 0.5, 0, 1) for length in slow if length <= part.size
    ]
    if not shapes:
        return False
    sides = fit.values[start : left.stop], fit.values[right.start : stop]
    jumping = sum(one.size * float(one.var()) for one in sides)
    least = _least_rest(part, np.concatenate(shapes)[:, None])
    return jumping - least > _BEYOND_A_STEP * fit.inflation * jumping / part.size
