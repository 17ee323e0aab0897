"""Effects of devices on the values of one series, estimated from the changes of device.

If no device was present both before and after a change of device, the effect of the device cannot
be separated from other changes at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from flexq_bench.stats.log_series import Floats, Ints, difference_scale, robust_scale, run_bounds
from flexq_bench.stats.modes import Modes
from flexq_bench.stats.segments import SHORTEST_SEGMENT, residuals_of
from flexq_bench.stats.steps import POINTS_BEFORE_FIRST, Fit, StepRules, fit_steps

_BESIDE = 5  # values on either side of a change of device from which its jump is estimated
# weight of equal devices relative to a change: it only decides between equal solutions
_ALIKE = 1e-3
_CLIP_SIGMAS = 4.0
_REFITS = 2
# share of values at a change of device, below which a coincidence with one is significant
_SELDOM = 0.3
# share of the mode switches at a change of device, if the devices cause the modes
_COINCIDING = 0.8
_PURE = 0.95  # share of the values of each device in one mode, if the devices cause the modes


@dataclass(frozen=True, slots=True)
class DeviceEffects:
    """component: [n] effect of the device of each value; 0 for the newest device.

    span: of the effects, from the smallest to the largest. unresolved: indices of changes of device
    for which no device was present before and after, each with its jump, which the component
    includes.
    """

    component: Floats
    span: float
    unresolved: tuple[tuple[int, float], ...] = ()


def device_effects(
    values: Floats, devices: Ints, modes: Modes | None, rules: StepRules
) -> DeviceEffects | None:
    """The effects of devices [n, any integers] on values [n]; None: there is one device.

    A device with fewer than 3 values has no effect of its own. Effects explain as many changes of
    device as possible (least absolute deviations of the medians of 5 values on either side). Of
    equal solutions the one with the smallest effects is chosen, so that an unexplained change is a
    step. Then effects and levels are fitted together. If no device was present before and after a
    change of device, the whole difference is an effect. With eight or more blocks between such
    changes, each block counts as one value, and steps of these are no effects. modes: of the
    values; unless the devices cause the modes, effects are those within a mode.
    """
    _, codes, counts = np.unique(devices, return_inverse=True, return_counts=True)
    known = np.flatnonzero((counts >= SHORTEST_SEGMENT)[codes])
    if np.unique(codes[known]).size < 2:
        return None
    single = values
    if modes is not None and not _are_devices(modes, codes[known], known):
        single = values - modes.offset
    used = single[known]
    code = np.unique(codes[known], return_inverse=True)[1].astype(np.int64)
    blocks = _blocks(code)
    added = _effects_of_blocks(used, code, blocks, rules)
    if blocks.size - 1 >= POINTS_BEFORE_FIRST + SHORTEST_SEGMENT:
        added = added - _steps_of_blocks(added, blocks, rules)
    component = np.zeros_like(values)
    component[known] = added
    component -= added[-1]
    changes = tuple((int(known[at]), float(added[at] - added[at - 1])) for at in blocks[1:-1])
    return DeviceEffects(component, float(np.ptp(added)), changes)


def _effects_of_blocks(values: Floats, code: Ints, blocks: Ints, rules: StepRules) -> Floats:
    """[n] effects of devices inside each block; between blocks the whole difference."""
    added = np.zeros_like(values)
    before = 0.0
    for low, high in pairwise(blocks):
        inside = np.unique(code[low:high], return_inverse=True)[1].astype(np.int64)
        effects, first, last = _inside_block(values[low:high], inside, rules)
        added[low:high] = effects + first - before
        before += last - first
    return added


def _inside_block(values: Floats, code: Ints, rules: StepRules) -> tuple[Floats, float, float]:
    """[n] effects of recurring devices, and the levels at the start and the end of the block."""
    offsets = np.zeros(int(code.max()) + 1)
    if offsets.size > 1:
        offsets = _from_changes(values, code, floor=rules.smallest / 5)
    effects = offsets[code]
    if values.size < POINTS_BEFORE_FIRST + SHORTEST_SEGMENT:
        level = float(np.mean(values - effects))
        return effects, level, level
    fit = fit_steps(values - effects, rules)
    for _ in range(_REFITS if offsets.size > 1 else 0):
        offsets = offsets + _beside_levels(fit, values - effects, code, rules.smallest / 5)
        effects = offsets[code]
        fit = fit_steps(values - effects, rules)
    return effects, fit.segments[0].at(0), fit.segments[-1].at(values.size - 1)


def _are_devices(modes: Modes, codes: Ints, known: Ints) -> bool:
    """Return True if the mode changes with the device, or nearly all values of each device have
    one.
    """
    changed = np.zeros(modes.place.size, dtype=np.bool_)
    changed[known[1:]] = np.diff(codes) != 0
    switched = np.flatnonzero(np.diff(modes.place)) + 1
    if changed.mean() < _SELDOM and changed[switched].mean() >= _COINCIDING:
        return True
    counts = [np.bincount(modes.place[known[codes == one]]) for one in np.unique(codes)]
    pure = all(one.max() >= _PURE * one.sum() for one in counts)
    return pure and len({int(one.argmax()) for one in counts}) > 1


def _from_changes(values: Floats, code: Ints, *, floor: float) -> Floats:
    """[devices] offsets with the least sum of absolute deviations from the jumps at changes of
    device.
    """
    # slow to import, and needed only for series of several devices
    from scipy.optimize import linprog

    bounds = run_bounds(code)
    count, changes = int(code.max()) + 1, bounds.size - 2
    sigma = max(difference_scale(values, floor=floor), np.finfo(np.float64).tiny)
    jumps = np.zeros(changes + count)
    weights = np.zeros(changes + count)
    effects = np.zeros((changes + count, count))
    scaled = (values / sigma).tolist()
    for row, (start, at, stop) in enumerate(zip(bounds, bounds[1:], bounds[2:], strict=False)):
        left, right = scaled[max(start, at - _BESIDE) : at], scaled[at : min(stop, at + _BESIDE)]
        jumps[row] = median(right) - median(left)
        weights[row] = 1 / math.sqrt(1 / len(left) + 1 / len(right))
        effects[row, code[at]] += 1
        effects[row, code[at - 1]] -= 1
    weights[changes:] = _ALIKE * weights[:changes].min()
    effects[changes:] = np.eye(count)
    identity = np.eye(changes + count)
    solved = linprog(
        np.concatenate([np.zeros(count), weights, weights]),
        A_eq=np.hstack([effects, identity, -identity]),
        b_eq=jumps,
        bounds=[(None, None)] * count + [(0, None)] * (2 * (changes + count)),
        method="highs",
    )
    offsets: Floats = sigma * solved.x[:count]
    return offsets


def _beside_levels(fit: Fit, values: Floats, code: Ints, floor: float) -> Floats:
    """[devices] corrections of the offsets, by least squares together with the segments."""
    rest = residuals_of(values, list(fit.segments))
    limit = _CLIP_SIGMAS * float(robust_scale(rest, floor=floor))
    rest = np.clip(rest, -limit, limit)
    columns = [(code == one).astype(np.float64) for one in range(int(code.max()) + 1)]
    devices = len(columns)
    place = np.arange(values.size)
    for one in fit.segments:
        within = ((place >= one.start) & (place < one.stop)).astype(np.float64)
        columns.append(within)
        if one.slope:
            columns.append(within * (place - (one.start + one.stop - 1) / 2) / one.size)
    design = np.stack(columns, axis=1)
    # A weight of one value for no correction: without evidence against a step nothing moves.
    stay = np.eye(len(columns))[:devices]
    solved = np.linalg.lstsq(
        np.vstack([design, stay]), np.concatenate([rest, np.zeros(devices)]), rcond=None
    )[0]
    moved: Floats = solved[:devices]
    return moved


def _blocks(code: Ints) -> Ints:
    """Bounds [blocks + 1] between which each device has all of its values."""
    place = np.arange(code.size)
    last = np.zeros(int(code.max()) + 1, dtype=np.int64)
    np.maximum.at(last, code, place)
    ends = np.flatnonzero(np.maximum.accumulate(last[code]) == place) + 1
    return np.concatenate(([0], ends)).astype(np.int64)


def _steps_of_blocks(added: Floats, blocks: Ints, rules: StepRules) -> Floats:
    """[n] the levels of the blocks' effects, where each block counts as one value."""
    levels = np.array([float(np.mean(added[low:high])) for low, high in pairwise(blocks)])
    fit = fit_steps(levels, rules)
    stepped = np.zeros_like(levels)
    for position, one in enumerate(fit.boundaries):
        if one.p_value <= rules.significance:
            stepped[fit.segments[position + 1].start :] += one.effect
    return np.repeat(stepped, np.diff(blocks))
