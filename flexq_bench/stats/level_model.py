"""Model of a series: levels and steps between them, drifts, modes, spells, noise."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.bends import CLIP_SIGMAS
from flexq_bench.stats.boundary_tests import SURROUNDINGS
from flexq_bench.stats.clear_steps import EarlierLooks
from flexq_bench.stats.device_effects import DeviceEffects, device_effects
from flexq_bench.stats.log_series import SAME_VALUE, Floats, Ints
from flexq_bench.stats.modes import STICKY, Modes, find_modes
from flexq_bench.stats.recoveries import (
    LONGEST_RECOVERY,
    Excursion,
    find_recoveries,
    without_recoveries,
)
from flexq_bench.stats.returns import Returns, find_returns, find_sawtooth
from flexq_bench.stats.seasons import find_season
from flexq_bench.stats.segments import SHORTEST_SEGMENT, Segment, residuals_of
from flexq_bench.stats.steps import (
    ANY_SERIES,
    POINTS_BEFORE_FIRST,
    Boundary,
    Fit,
    StepRules,
    fit_steps,
)

FEWEST_POINTS = POINTS_BEFORE_FIRST + SHORTEST_SEGMENT
# standard errors below it, required before a change of frequency is searched for
_MEMORY_ERRORS = 1.5
LONGEST_SPELL = 3  # values; a longer one is a level
_DRIFT_SIGMAS = 5.0
_SMALLEST_DRIFT = 0.01  # from its onset to its end
_SAME_STEP = 3  # largest distance in values of two detections of one step


def _relative(before: float, after: float) -> float:
    if before == 0:
        return float(np.copysign(np.inf, after))
    return (after - before) / abs(before)


@dataclass(frozen=True, slots=True)
class Step:
    """A change of the level; with modes, of all of them.

    index: of the first value on the new level. before, after: levels next to the step, those of the
    lower mode, in the unit of the series. p_value: probability of a step this large anywhere in
    noise alone. of_share: the frequency of the upper mode changed; before and after are means.
    """

    index: int
    before: float
    after: float
    p_value: float
    of_share: bool = False

    @property
    def relative_change(self) -> float:
        """after / before - 1 for positive levels; infinite from a level of 0."""
        return _relative(self.before, self.after)


@dataclass(frozen=True, slots=True)
class Drift:
    """A level that changes slightly with every value from onset up to, but not including, end.

    slope: per value, as a fraction of the level. change: over all values.
    """

    onset: int
    end: int
    slope: float
    change: float


@dataclass(frozen=True, slots=True)
class ModeSwitch:
    """The first value after a change of mode. upper: True if it is in the upper one of the two."""

    index: int
    upper: bool


@dataclass(frozen=True, slots=True)
class Spell:
    """A few values on another level, after which the old level returned; change: a fraction."""

    start: int
    stop: int
    change: float


@dataclass(frozen=True, slots=True)
class ModeSet:
    """gap: of the highest mode from the lowest one, as a fraction of it. share: of values above the
    lowest.

    memory: of the mode from one value to the next; from 1/3 on the switches are listed. count:
    number of modes.
    """

    gap: float
    share: float
    memory: float
    count: int = 2

    @property
    def levels(self) -> str:
        """The modes in words, such as `two levels that are 12.0% apart`."""
        if self.count == 2:
            return f"two levels that are {self.gap:.1%} apart"
        return f"{self.count} levels that are up to {self.gap:.1%} apart"


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

    sigma: of one value from its level, as a fraction. memory: AR(1) coefficient. period: of the
    seasonal component, in values; 0: none. seasonal: its range, a fraction; levels are its mean.
    device_span: between the effects of the slowest and the fastest device, a fraction; 0: one
    device. Levels are those on the newest device. device_changes: changes of device that may hide a
    step of any size; they are no steps.
    """

    size: int
    steps: tuple[Step, ...] = ()
    drifts: tuple[Drift, ...] = ()
    modes: ModeSet | None = None
    switches: tuple[ModeSwitch, ...] = ()
    spells: tuple[Spell, ...] = ()
    sigma: float = 0.0
    memory: float = 0.0
    period: int = 0
    seasonal: float = 0.0
    device_span: float = 0.0
    device_changes: tuple[DeviceChange, ...] = ()


@dataclass(frozen=True, slots=True)
class _Detected:
    """A step, and what its confirmation depends on.

    age: number of values after it, up to the last one that is not back on the level before it.
    beside_a_line: True if one of its sides is a drift.
    """

    step: Step
    age: int
    beside_a_line: bool


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
    values: ArrayLike, rules: StepRules = ANY_SERIES, devices: Sequence[Hashable] | None = None
) -> LevelModel:
    """The steps, drifts, modes and spells that explain a series together.

    values: [n], any unit and sign; NaN and infinities are gaps. Positive values are analysed as
    logarithms, others unchanged. Fewer than 8 usable values, or equal ones, have no step and raise
    no error. A level has at least 3 values, and the first step at least 5 values before it. rules:
    by default those for values of any origin; `HISTORY_RULES` are for times of this project.
    devices: [n] the device of each value; None: one device. The effect of a device is no step. A
    change of level at a change of device is no step either, unless a device that was present before
    and after separates the two. Raises ValueError if values is not one-dimensional, or devices has
    another length.

    Segments of a level or a line are in `segments`, the test of each step in `steps`, modes in
    `modes`. Some rules also use `recoveries` (jumps that fade), `returns` (recurring levels) and
    `clear_steps` (steps that must be confirmed by later looks).
    """
    usable, index = usable_values(values)
    size = int(np.asarray(values).size)
    if devices is not None and len(devices) != size:
        raise ValueError(f"one device per value is needed, got {len(devices)} for {size}")
    codes = _numbered(devices, index)
    model, detected = _look(usable, index, size, rules, codes)
    if not (model.steps and rules.earlier_looks):
        return model

    def steps_without(newest: int) -> tuple[int, ...]:
        known = None if codes is None else codes[:-newest]
        earlier, _ = _look(usable[:-newest], index[:-newest], size, rules, known)
        return tuple(one.index for one in earlier.steps)

    looks = EarlierLooks(steps_without, rules.earlier_looks)
    steps = tuple(
        one.step
        for one in detected
        if looks.confirms(
            one.step.index,
            one.age,
            one.step.p_value,
            model.memory,
            beside_a_line=one.beside_a_line,
            after_spells=any(spell.stop <= one.step.index for spell in model.spells),
        )
    )
    return replace(model, steps=steps)


def on_newest_device(
    values: ArrayLike, devices: Sequence[Hashable], rules: StepRules = ANY_SERIES
) -> Floats:
    """[n] the values as the newest device would have measured them; arguments as `level_model`'s.

    A change of level at a change to a device that stays is taken for the device's effect.
    """
    usable, index = usable_values(values)
    moved = np.array(values, dtype=np.float64)
    codes = _numbered(devices, index)
    if codes is None or usable.size < FEWEST_POINTS:
        return moved
    scaled, scale = _scaled(usable)
    rest, _, _ = _without_devices(scaled, codes, _modes(scaled, rules), rules)
    moved[index] = np.exp(rest) if scale.unit is None else rest * scale.unit
    return moved


def _numbered(devices: Sequence[Hashable] | None, index: Ints) -> Ints | None:
    """A number for each device, for the values at these indices; None: there is one device."""
    if devices is None:
        return None
    names = [devices[at] for at in index.tolist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], dtype=np.int64) if len(numbers) > 1 else None


def _look(
    usable: Floats, index: Ints, size: int, rules: StepRules, devices: Ints | None
) -> tuple[LevelModel, list[_Detected]]:
    """The model of one look, and what the confirmation of its steps needs to know."""
    if usable.size < FEWEST_POINTS or np.ptp(usable) <= SAME_VALUE * np.abs(usable).max():
        return LevelModel(size), []
    scaled, scale = _scaled(usable)
    season = find_season(scaled, index, rules.periods)
    if season is not None:
        scaled = scaled - season.component
    modes = _modes(scaled, rules)
    effects = None
    if devices is not None:
        scaled, modes, effects = _without_devices(scaled, devices, modes, rules)
    single = scaled if modes is None else scaled - modes.offset
    recoveries = find_recoveries(single) if rules.earlier_looks else []
    fit = fit_steps(without_recoveries(single, recoveries), rules)
    bounds, short = _without_spells(fit, rules.significance)
    spells = sorted([*short, *recoveries])
    returns = find_returns(single, fit, bounds) if rules.earlier_looks else Returns()
    sawtooth = find_sawtooth(fit, bounds)
    switched = sorted({*returns.switches, *sawtooth})
    bounds = [at for at in bounds if at not in {*switched, *returns.waiting}]
    detected = [_detected(_step(fit, at, scale, index), fit, at, single) for at in bounds]
    if modes is not None and modes.memory + _MEMORY_ERRORS * modes.memory_error < STICKY:
        # If each value draws its mode, the frequency of the modes may change as well.
        # Without steps and drifts of both modes, which would look like changes of their frequency.
        base = single - residuals_of(single, list(fit.segments))
        mixed = fit_steps(scaled - base, rules)
        others, _ = _without_spells(mixed, rules.significance)
        apart = [
            at
            for at in others
            if all(
                abs(mixed.segments[at + 1].start - one) > _SAME_STEP * 3
                for one in (fit.segments[b + 1].start for b in bounds)
            )
        ]
        detected += [
            _detected(_step(mixed, at, scale, index, base=base), mixed, at, scaled - base)
            for at in apart
        ]
        detected.sort(key=lambda one: one.step.index)
    model = LevelModel(
        size=size,
        steps=tuple(one.step for one in detected),
        drifts=_drifts(fit, scale, index, sawtooth),
        modes=_mode_set(modes, scale),
        switches=_switches(modes, fit, switched, index),
        spells=tuple(
            Spell(int(index[start]), int(index[stop - 1]) + 1, scale.fraction(effect))
            for start, stop, effect in spells
        ),
        sigma=fit.sigma,
        memory=fit.memory,
        period=0 if season is None else season.period,
        seasonal=0.0 if season is None else scale.fraction(season.depth),
        device_span=0.0 if effects is None else scale.fraction(effects.span),
        device_changes=_device_changes(effects, fit, scale, index),
    )
    return model, detected


def _modes(scaled: Floats, rules: StepRules) -> Modes | None:
    return find_modes(
        scaled,
        least_noise=rules.smallest / 5,
        longest_visit=rules.longest_visit,
        significance=rules.significance,
        most=rules.most_modes,
    )


def _without_devices(
    scaled: Floats, devices: Ints, modes: Modes | None, rules: StepRules
) -> tuple[Floats, Modes | None, DeviceEffects | None]:
    """The values without the effects of devices, the modes of the result, and the effects."""
    effects = device_effects(scaled, devices, modes, rules)
    if effects is None:
        return scaled, modes, None
    rest = scaled - effects.component
    return rest, _modes(rest, rules), effects


def _device_changes(
    effects: DeviceEffects | None, fit: Fit, scale: _Scale, index: Ints
) -> tuple[DeviceChange, ...]:
    """Changes of device that may hide a step; errors are those of 60 values on either side."""
    if effects is None:
        return ()
    inflation = float(np.sqrt((1 + fit.memory) / (1 - fit.memory)))
    places = [0, *(at for at, _ in effects.unresolved), index.size]
    changes = []
    for (low, at, high), (_, jump) in zip(
        zip(places, places[1:], places[2:], strict=False), effects.unresolved, strict=True
    ):
        level = next(one for one in fit.segments if one.start < at <= one.stop).at(at - 0.5)
        before = level + float(effects.component[at - 1])
        sides = [min(at - low, SURROUNDINGS), min(high - at, SURROUNDINGS)]
        changes.append(
            DeviceChange(
                int(index[at]),
                scale.value(before),
                scale.value(before + jump),
                fit.sigma * inflation * float(np.sqrt(1 / sides[0] + 1 / sides[1])),
            )
        )
    return tuple(changes)


def _detected(step: Step, fit: Fit, position: int, values: Floats) -> _Detected:
    left, right = fit.segments[position], fit.segments[position + 1]
    # After a spell, one or two values on the old level look like outliers of the new one.
    after, before = values[right.start :], left.at(right.start - 0.5)
    replaced = np.abs(fit.cleaned[right.start :] - after) > abs(fit.boundaries[position].effect) / 4
    back = replaced & (np.abs(after - before) <= CLIP_SIGMAS * fit.sigma)
    age = int(np.flatnonzero(~back).max(initial=-1)) + 1
    return _Detected(step, age, bool(left.slope or right.slope))


def _scaled(usable: Floats) -> tuple[Floats, _Scale]:
    if float(usable.min()) > 0:
        return np.log(usable), _Scale(None)
    unit = float(np.median(np.abs(usable)))
    if unit == 0:
        unit = float(np.abs(usable).max())
    return usable / unit, _Scale(unit)


def _without_spells(fit: Fit, significance: float) -> tuple[list[int], list[Excursion]]:
    """Positions of the boundaries that are steps, and the spells.

    A spell ends on the level from which it started: after a few values, or gradually.
    """
    kept: list[int] = []
    spells: list[Excursion] = []
    for position, boundary in enumerate(fit.boundaries):
        is_step = boundary.p_value <= significance
        if kept and kept[-1] == position - 1:
            short, into = fit.segments[position], fit.boundaries[position - 1]
            longest = LONGEST_SPELL if is_step else LONGEST_RECOVERY
            left = abs(into.effect + boundary.effect)
            if (
                short.size <= longest
                and (is_step or not short.slope)
                and left < min(abs(into.effect), abs(boundary.effect)) / 4
            ):
                kept.pop()
                spells.append((short.start, short.stop, into.effect))
                continue
        if is_step:
            kept.append(position)
    return kept, spells


def _step(
    fit: Fit, position: int, scale: _Scale, index: Ints, *, base: Floats | None = None
) -> Step:
    """Return the step at a boundary; base: [n] the lower mode, for a change of frequency."""
    left, right = fit.segments[position], fit.segments[position + 1]
    boundary: Boundary = fit.boundaries[position]
    at = right.start - 0.5
    below = 0.0 if base is None else float(base[right.start])
    return Step(
        int(index[right.start]),
        scale.value(below + left.at(at)),
        scale.value(below + right.at(at)),
        boundary.p_value,
        of_share=base is not None,
    )


def _drifts(fit: Fit, scale: _Scale, index: Ints, sawtooth: tuple[int, ...]) -> tuple[Drift, ...]:
    """Lines outside a sawtooth; lines in one direction on both sides of a step are one drift."""
    ramps = range(sawtooth[0], sawtooth[-1] + 2) if sawtooth else range(0)
    inflation = (1 + fit.memory) / (1 - fit.memory)
    limit = (_DRIFT_SIGMAS * fit.sigma) ** 2 * inflation
    runs: list[list[Segment]] = []
    for at, one in enumerate(fit.segments):
        if not one.slope or at in ramps:
            continue
        last = runs[-1][-1] if runs else None
        if last is not None and last.stop == one.start and last.slope * one.slope > 0:
            runs[-1].append(one)
        else:
            runs.append([one])
    drifts = []
    for run in runs:
        saved = sum(one.slope**2 * one.size * (one.size**2 - 1) / 12 for one in run)
        change = sum(one.slope * (one.size - 1) for one in run)
        if saved > limit and abs(change) >= _SMALLEST_DRIFT:
            length = sum(one.size for one in run)
            drifts.append(
                Drift(
                    int(index[run[0].start]),
                    int(index[run[-1].stop - 1]) + 1,
                    scale.fraction(change / length),
                    scale.fraction(change),
                )
            )
    return tuple(drifts)


def _mode_set(modes: Modes | None, scale: _Scale) -> ModeSet | None:
    if modes is None:
        return None
    return ModeSet(scale.fraction(modes.gap), modes.share, modes.memory, modes.levels.size)


def _switches(
    modes: Modes | None, fit: Fit, switched: list[int], index: Ints
) -> tuple[ModeSwitch, ...]:
    """Switches of persistent modes, and of levels that recur."""
    found = [
        ModeSwitch(int(index[one.index]), one.effect > 0)
        for one in (fit.boundaries[at] for at in switched)
    ]
    if modes is not None and modes.memory >= STICKY:
        rises = np.diff(modes.place) > 0
        found += [ModeSwitch(int(index[at]), bool(rises[at - 1])) for at in modes.switches]
    return tuple(sorted(found, key=lambda one: one.index))
