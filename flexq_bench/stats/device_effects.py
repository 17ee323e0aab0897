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

from flexq_bench.stats.follower import followed
from flexq_bench.stats.log_series import Floats, Ints, difference_scale, robust_scale, run_bounds
from flexq_bench.stats.newest_step import CLIP_SIGMAS, FEWEST_POINTS, SHORTEST_LEVEL

_JUMP_VALUES = 5  # values on either side of a change of device from which its jump is estimated
# weight of equal devices relative to a change: it only decides between equal solutions
_EQUAL_DEVICES_WEIGHT = 1e-3
_REFITS = 2


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


def device_effects(values: Floats, devices: Ints, smallest: float) -> DeviceEffects | None:
    """The effects of devices [n, any integers] on values [n]; None: there is one device.

    A device with fewer than 3 values has no effect of its own. Effects explain as many changes of
    device as possible (least absolute deviations of the medians of 5 values on either side). Of
    equal solutions the one with the smallest effects is chosen, so that an unexplained change is a
    step. Then effects and levels are fitted together. If no device was present before and after a
    change of device, the whole difference is an effect. With eight or more blocks between such
    changes, each block counts as one value, and steps of these are no effects. smallest: step that
    counts, in the unit of the values.
    """
    _, codes, counts = np.unique(devices, return_inverse=True, return_counts=True)
    known = np.flatnonzero((counts >= SHORTEST_LEVEL)[codes])
    if np.unique(codes[known]).size < 2:
        return None
    used = values[known]
    code = np.unique(codes[known], return_inverse=True)[1].astype(np.int64)
    blocks = _blocks(code)
    added = _effects_of_blocks(used, code, blocks, smallest)
    if blocks.size - 1 >= FEWEST_POINTS:
        added = added - _steps_of_blocks(added, blocks, smallest)
    component = np.zeros_like(values)
    component[known] = added
    component -= added[-1]
    changes = tuple((int(known[at]), float(added[at] - added[at - 1])) for at in blocks[1:-1])
    return DeviceEffects(component, float(np.ptp(added)), changes)


def _effects_of_blocks(values: Floats, code: Ints, blocks: Ints, smallest: float) -> Floats:
    """[n] effects of devices inside each block; between blocks the whole difference."""
    added = np.zeros_like(values)
    before = 0.0
    for low, high in pairwise(blocks):
        inside = np.unique(code[low:high], return_inverse=True)[1].astype(np.int64)
        effects, first, last = _inside_block(values[low:high], inside, smallest)
        added[low:high] = effects + first - before
        before += last - first
    return added


def _inside_block(values: Floats, code: Ints, smallest: float) -> tuple[Floats, float, float]:
    """[n] effects of recurring devices, and the levels at the start and the end of the block."""
    offsets = np.zeros(int(code.max()) + 1)
    if offsets.size > 1:
        offsets = _from_changes(values, code, floor=smallest / 5)
    rest = values - offsets[code]
    if values.size < FEWEST_POINTS:
        level = float(np.mean(rest))
        return offsets[code], level, level
    bounds = _bounds(rest, smallest)
    for _ in range(_REFITS if offsets.size > 1 else 0):
        offsets = offsets + _beside_levels(bounds, rest, code, smallest / 5)
        rest = values - offsets[code]
        bounds = _bounds(rest, smallest)
    first, last = (float(np.median(rest[a:b])) for a, b in (bounds[:2], bounds[-2:]))
    return offsets[code], first, last


def _bounds(values: Floats, smallest: float) -> list[int]:
    """Bounds of the levels of values [n]."""
    history = followed(values, smallest).history
    return [0, *sorted(at for at, _ in history.steps + history.waiting), values.size]


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
        left, right = (
            scaled[max(start, at - _JUMP_VALUES) : at],
            scaled[at : min(stop, at + _JUMP_VALUES)],
        )
        jumps[row] = median(right) - median(left)
        weights[row] = 1 / math.sqrt(1 / len(left) + 1 / len(right))
        effects[row, code[at]] += 1
        effects[row, code[at - 1]] -= 1
    weights[changes:] = _EQUAL_DEVICES_WEIGHT * weights[:changes].min()
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


def _beside_levels(bounds: list[int], values: Floats, code: Ints, floor: float) -> Floats:
    """[devices] corrections of the offsets, by least squares together with the levels."""
    parts = [values[low:high] for low, high in pairwise(bounds)]
    rest = np.concatenate([part - np.median(part) for part in parts])
    limit = CLIP_SIGMAS * float(robust_scale(rest, floor=floor))
    rest = np.clip(rest, -limit, limit)
    columns = [(code == one).astype(np.float64) for one in range(int(code.max()) + 1)]
    devices = len(columns)
    place = np.arange(values.size)
    columns += [
        ((place >= low) & (place < high)).astype(np.float64) for low, high in pairwise(bounds)
    ]
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


def _steps_of_blocks(added: Floats, blocks: Ints, smallest: float) -> Floats:
    """[n] the levels of the blocks' effects, where each block counts as one value."""
    levels = np.array([float(np.mean(added[low:high])) for low, high in pairwise(blocks)])
    bounds = _bounds(levels, smallest)
    middles = [float(np.median(levels[low:high])) for low, high in pairwise(bounds)]
    stepped = np.repeat(np.array(middles) - middles[0], np.diff(bounds))
    return np.repeat(stepped, np.diff(blocks))
