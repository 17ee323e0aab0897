"""Model of a series: levels and the steps between them, spells, effects of devices, noise."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.device_effects import DeviceEffects, device_effects
from flexq_bench.stats.follower import followed
from flexq_bench.stats.hindsight import look_back
from flexq_bench.stats.log_series import (
    SMALLEST_CHANGE,
    Floats,
    Ints,
    autocorrelation,
    robust_scale,
)
from flexq_bench.stats.newest_step import FEWEST_POINTS, SHORTEST_LEVEL, SURROUNDINGS


@dataclass(frozen=True, slots=True)
class Step:
    """A change of level.

    index: of the first value on the new level, in the series as given. before, after: medians of
    the values since the step before and until the next one, in the unit of the series and without
    the drift to the step. p_value:
    probability of a step this large anywhere in noise alone, when it was decided.
    """

    index: int
    before: float
    after: float
    p_value: float

    @property
    def relative_change(self) -> float:
        """after / before - 1 for positive levels; infinite from a level of 0."""
        return _relative(self.before, self.after)


@dataclass(frozen=True, slots=True)
class Spell:
    """Values [start, stop) on another level, after which the old level returned; change: a
    fraction.
    """

    start: int
    stop: int
    change: float


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """A change of device with no device present both before and after it.

    The effect of the device and a step cannot be distinguished there. index: of the first value on
    another device. before, after: levels next to it, in the unit of the series. error: standard
    error of ln(after / before), or of their difference in units of the median size if values have
    any sign.
    """

    index: int
    before: float
    after: float
    error: float

    @property
    def relative_change(self) -> float:
        """after / before - 1 for positive levels; infinite from a level of 0."""
        return _relative(self.before, self.after)


@dataclass(frozen=True, slots=True)
class LevelModel:
    """Components of a series [size], in its unit and with its indices, oldest first.

    waiting: the newest step, if its levels have not lasted long enough to tell it from a switch
    between two levels. sigma: of one value from its level, as a fraction. memory: AR(1)
    coefficient. drift: of all levels, from the first value to the last, a fraction. device_span:
    between the effects of the slowest and the fastest device, a fraction; 0: one device. Levels are
    those on the newest device. device_changes: changes of device that may hide a step of any size;
    they are no steps.
    """

    size: int
    steps: tuple[Step, ...] = ()
    waiting: Step | None = None
    spells: tuple[Spell, ...] = ()
    sigma: float = 0.0
    memory: float = 0.0
    drift: float = 0.0
    device_span: float = 0.0
    device_changes: tuple[DeviceChange, ...] = ()


@dataclass(frozen=True, slots=True)
class _Scale:
    """Logs of positive values; otherwise values in units of their median size."""

    unit: float | None

    def fraction(self, effect: float) -> float:
        return float(np.expm1(effect)) if self.unit is None else effect

    def value(self, scaled: float) -> float:
        return float(np.exp(scaled)) if self.unit is None else scaled * self.unit


def usable_values(values: ArrayLike) -> tuple[Floats, Ints]:
    """The finite values and their indices. Raises ValueError if values is not one-dimensional."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"a series has one dimension, got {array.ndim}")
    index = np.flatnonzero(np.isfinite(array))
    return array[index], index.astype(np.int64)


def level_model(
    values: ArrayLike,
    devices: Sequence[Hashable] | None = None,
    *,
    smallest: float | None = None,
    as_differences: bool = False,
    in_hindsight: bool = False,
    reruns: Sequence[Sequence[float]] = (),
) -> LevelModel:
    """The steps, spells and effects of devices that explain a series together.

    values: [n], any unit and sign; NaN and infinities are gaps. Positive values are analysed as
    logarithms, others unchanged. Fewer than 8 usable values, or equal ones, have no step and raise
    no error. devices: [n] the device of each value; None: one device. The effect of a device is no
    step. A change of level at a change of device is no step either, unless a device that was
    present before and after separates the two. smallest: step that counts, as a fraction of the
    level; of the median size if values have any sign. None: 0.01 (of differences any), and a share
    of the range of the levels. as_differences: positive values are not logarithms either, and
    smallest is in their unit. in_hindsight: by all values, not by those seen when each step was
    decided; then the levels of positive values may share a drift. reruns: [n] results that each
    value combines, evidence of noise. Raises ValueError if values is not one-dimensional, or
    devices has another length.
    """
    usable, index = usable_values(values)
    size = int(np.asarray(values).size)
    if devices is not None and len(devices) != size:
        raise ValueError(f"one device per value is needed, got {len(devices)} for {size}")
    if usable.size < FEWEST_POINTS:
        return LevelModel(size)
    scaled, scale = _scaled(usable, as_differences=as_differences)
    least = smallest
    if least is None:
        least = 0.0 if as_differences else SMALLEST_CHANGE
    if scale.unit is None:
        least = float(np.log1p(least))
    elif as_differences:
        least /= scale.unit
    codes = _numbered(devices, index)
    effects = None if codes is None else device_effects(scaled, codes, least)
    if effects is not None:
        scaled = scaled - effects.component
    are_logs, any_share = scale.unit is None, smallest is not None
    noise = _noise_of_reruns([reruns[at] for at in index.tolist()], scale) if reruns else 0.0
    if in_hindsight:
        history = look_back(scaled, least, are_logs=are_logs, any_share=any_share, noise=noise)
    else:
        follower = followed(scaled, least, are_logs=are_logs, any_share=any_share, noise=noise)
        history = follower.history
    scaled = scaled - history.drift * np.arange(scaled.size)
    decided = _agreeing(scaled, list(history.steps))
    waiting = [one for one in history.waiting[-1:] if one > max(decided, default=(0, 0.0))]
    model = [*decided, *waiting]
    # the step that waits is not part of the level before it
    levels = _levels(scaled, [at for at, _ in model])
    steps = [
        Step(
            int(index[at]),
            scale.value(before + history.drift * at),
            scale.value(after + history.drift * at),
            p_value,
        )
        for (at, p_value), (before, after) in zip(model, pairwise(levels), strict=True)
    ]
    bounds = [0, *(at for at, _ in model), scaled.size]
    residuals = np.concatenate(
        [scaled[a:b] - level for (a, b), level in zip(pairwise(bounds), levels, strict=True)]
    )
    sigma = float(robust_scale(residuals, floor=0.0))
    memory = autocorrelation(
        np.clip(residuals, -3 * sigma, 3 * sigma) if sigma else residuals, levels=len(levels)
    )
    return LevelModel(
        size=size,
        steps=tuple(steps[: len(decided)]),
        waiting=steps[-1] if waiting else None,
        spells=tuple(
            Spell(int(index[start]), int(index[stop - 1]) + 1, scale.fraction(effect))
            for start, stop, effect in history.spells
        ),
        sigma=sigma,
        memory=memory,
        drift=scale.fraction(history.drift * (scaled.size - 1)),
        device_span=0.0 if effects is None else scale.fraction(effects.span),
        device_changes=()
        if effects is None
        else _device_changes(
            effects,
            dict(zip(bounds, levels, strict=False)),
            history.drift,
            sigma * float(np.sqrt((1 + memory) / (1 - memory))),
            scale,
            index,
        ),
    )


def on_newest_device(values: ArrayLike, devices: Sequence[Hashable]) -> Floats:
    """[n] the values as the newest device would have measured them; arguments as `level_model`'s.

    A change of level at a change to a device that stays is taken for the device's effect.
    """
    usable, index = usable_values(values)
    moved = np.array(values, dtype=np.float64)
    codes = _numbered(devices, index)
    if codes is None or usable.size < FEWEST_POINTS:
        return moved
    scaled, scale = _scaled(usable, as_differences=False)
    effects = device_effects(scaled, codes, float(np.log1p(SMALLEST_CHANGE)))
    if effects is not None:
        rest = scaled - effects.component
        moved[index] = np.exp(rest) if scale.unit is None else rest * scale.unit
    return moved


def _relative(before: float, after: float) -> float:
    if before == 0:
        return float(np.copysign(np.inf, after))
    return (after - before) / abs(before)


def _numbered(devices: Sequence[Hashable] | None, index: Ints) -> Ints | None:
    """A number for each device, for the values at these indices; None: there is one device."""
    if devices is None:
        return None
    names = [devices[at] for at in index.tolist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], dtype=np.int64) if len(numbers) > 1 else None


def _scaled(usable: Floats, *, as_differences: bool) -> tuple[Floats, _Scale]:
    if float(usable.min()) > 0 and not as_differences:
        return np.log(usable), _Scale(None)
    unit = float(np.median(np.abs(usable)))
    if unit == 0:
        unit = float(np.abs(usable).max()) or 1.0
    return usable / unit, _Scale(unit)


def _noise_of_reruns(reruns: Sequence[Sequence[float]], scale: _Scale) -> float:
    """Sigma of a typical value by results of the same commit; 0: too few, or not as the values.

    Commits of one night share what nights add to the noise, so it is a lower limit.
    """
    several = [np.asarray(own, dtype=np.float64) for own in reruns if len(own) > 1]
    freedom = sum(own.size - 1 for own in several)
    if freedom < SHORTEST_LEVEL or (scale.unit is None and any(own.min() <= 0 for own in several)):
        return 0.0
    scaled = [np.log(own) if scale.unit is None else own / scale.unit for own in several]
    variance = sum(float(own.var() * own.size) for own in scaled) / freedom
    sizes = np.array([max(len(own), 1) for own in reruns])
    return float(np.sqrt(variance / np.median(sizes)))


def _levels(values: Floats, starts: Sequence[int]) -> list[float]:
    return [float(np.median(part)) for part in np.split(values, list(starts))]


def _agreeing(values: Floats, steps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Steps without those between equal medians, the least certain of them first.

    A step is reported with the medians on its sides, so its direction is theirs.
    """
    while True:
        levels = _levels(values, [at for at, _ in steps])
        equal = [
            one for one, (low, high) in zip(steps, pairwise(levels), strict=True) if low == high
        ]
        if not equal:
            return steps
        steps.remove(max(equal, key=lambda one: one[1]))


def _device_changes(
    effects: DeviceEffects,
    levels: dict[int, float],
    drift: float,
    error: float,
    scale: _Scale,
    index: Ints,
) -> tuple[DeviceChange, ...]:
    """Changes of device that may hide a step.

    levels: by their first value. error: of one independent value; those of the changes are of 60
    values on either side.
    """
    places = [0, *(at for at, _ in effects.unresolved), index.size]
    changes = []
    for (low, at, high), (_, jump) in zip(
        zip(places, places[1:], places[2:], strict=False), effects.unresolved, strict=True
    ):
        level = levels[max(start for start in levels if start < at)]
        before = level + drift * at + float(effects.component[at - 1])
        sides = [min(at - low, SURROUNDINGS), min(high - at, SURROUNDINGS)]
        changes.append(
            DeviceChange(
                int(index[at]),
                scale.value(before),
                scale.value(before + jump),
                error * float(np.sqrt(1 / sides[0] + 1 / sides[1])),
            )
        )
    return tuple(changes)
