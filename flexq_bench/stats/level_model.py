"""Model of a series: levels and steps between them, drifts, two modes, spells, noise."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.clear_steps import EarlierLooks
from flexq_bench.stats.log_series import SAME_VALUE, Floats, Ints
from flexq_bench.stats.modes import STICKY, Modes, find_modes
from flexq_bench.stats.recoveries import Excursion, find_recoveries, without_recoveries
from flexq_bench.stats.returns import Returns, find_returns, find_sawtooth
from flexq_bench.stats.seasons import find_season
from flexq_bench.stats.segments import SHORTEST_SEGMENT, Segment
from flexq_bench.stats.steps import (
    ANY_SERIES,
    POINTS_BEFORE_FIRST,
    Boundary,
    Fit,
    StepRules,
    fit_steps,
)

FEWEST_POINTS = POINTS_BEFORE_FIRST + SHORTEST_SEGMENT
_MEMORY_ERRORS = 1.5  # by which it is below that, before a change of how often is looked for
LONGEST_SPELL = 3  # values; longer, and it was a level
_DRIFT_SIGMAS = 5.0
_SMALLEST_DRIFT = 0.01  # from its onset to its end
_SAME_STEP = 3  # values that two findings of one step lie apart at most


@dataclass(frozen=True, slots=True)
class Step:
    """A change of the level, of both modes where there are two.

    index: of the first value on the new level. before, after: levels beside the step, of the lower
    mode, in the unit of the series. p_value: of a step as large anywhere in noise alone.
    of_share: what changed is how often the upper mode is visited; before and after are means.
    """

    index: int
    before: float
    after: float
    p_value: float
    of_share: bool = False

    @property
    def relative_change(self) -> float:
        """after / before - 1 for positive levels; infinite from a level of 0."""
        if self.before == 0:
            return float(np.copysign(np.inf, self.after))
        return (self.after - self.before) / abs(self.before)


@dataclass(frozen=True, slots=True)
class Drift:
    """A level that moves a little with every value from onset on, up to, not including, end.

    slope: of one value, as a fraction of the level. change: of all of them.
    """

    onset: int
    end: int
    slope: float
    change: float


@dataclass(frozen=True, slots=True)
class ModeSwitch:
    """The first value in another mode than the one before it. upper: it is the upper one."""

    index: int
    upper: bool


@dataclass(frozen=True, slots=True)
class Spell:
    """A few values elsewhere, after which the level was what it had been; change: a fraction."""

    start: int
    stop: int
    change: float


@dataclass(frozen=True, slots=True)
class ModePair:
    """gap: of the upper mode to the lower one, as a fraction of it. share: of values in the upper.

    memory: of the mode from one value to the next; from 1/3 on the switches are listed.
    """

    gap: float
    share: float
    memory: float


@dataclass(frozen=True, slots=True)
class LevelModel:
    """All of a series [size] in the unit and the indices that it was given in, oldest first.

    sigma: of one value about its level, as a fraction. memory: AR(1), of neighbours.
    period: of the seasonal component, in values; 0: none. seasonal: its range, a fraction; levels
    are its mean.
    """

    size: int
    steps: tuple[Step, ...] = ()
    drifts: tuple[Drift, ...] = ()
    modes: ModePair | None = None
    switches: tuple[ModeSwitch, ...] = ()
    spells: tuple[Spell, ...] = ()
    sigma: float = 0.0
    memory: float = 0.0
    period: int = 0
    seasonal: float = 0.0


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


def level_model(values: ArrayLike, rules: StepRules = ANY_SERIES) -> LevelModel:
    """The steps, drifts, modes and spells that explain a series together.

    values: [n], any unit and sign; NaN and infinities are gaps. Of positive values the logarithms
    are looked at, others are taken as they are. Fewer than 8 usable ones, or equal ones, have no
    step: never an error. A level holds for 3 values or more and 5 come before the first step.
    rules: by default those for values of any origin; `HISTORY_RULES` are for times of this project.
    Raises ValueError if values is not one-dimensional.

    Segments of a level or a line: `segments`; the test of each step: `steps`; modes: `modes`. With
    rules that ask for it also jumps that fade, `recoveries`; levels that come back, `returns`; and
    steps that have to wait, `clear_steps`.
    """
    usable, index = usable_values(values)
    size = int(np.asarray(values).size)
    model, beside_lines = _look(usable, index, size, rules)
    if not (model.steps and rules.earlier_looks):
        return model

    def steps_without(newest: int) -> tuple[int, ...]:
        earlier, _ = _look(usable[:-newest], index[:-newest], size, rules)
        return tuple(one.index for one in earlier.steps)

    looks = EarlierLooks(steps_without, rules.earlier_looks)
    steps = tuple(
        one
        for one, beside in zip(model.steps, beside_lines, strict=True)
        if looks.confirms(
            one.index,
            int(np.count_nonzero(index >= one.index)),
            one.p_value,
            model.memory,
            beside_a_line=beside,
        )
    )
    return replace(model, steps=steps)


def _look(
    usable: Floats, index: Ints, size: int, rules: StepRules
) -> tuple[LevelModel, list[bool]]:
    """The model of one look, and which of its steps have a line on a side."""
    if usable.size < FEWEST_POINTS or np.ptp(usable) <= SAME_VALUE * np.abs(usable).max():
        return LevelModel(size), []
    scaled, scale = _scaled(usable)
    season = find_season(scaled, index, rules.periods)
    if season is not None:
        scaled = scaled - season.component
    modes = find_modes(
        scaled,
        least_noise=rules.smallest / 5,
        longest_visit=rules.longest_visit,
        significance=rules.significance,
    )
    single = scaled if modes is None else scaled - modes.offset
    recoveries = find_recoveries(single) if rules.earlier_looks else []
    fit = fit_steps(without_recoveries(single, recoveries), rules)
    bounds, short = _without_spells(fit, rules.significance)
    spells = sorted([*short, *recoveries])
    returns = find_returns(single, fit, bounds) if rules.earlier_looks else Returns()
    sawtooth = find_sawtooth(fit, bounds)
    switched = sorted({*returns.switches, *sawtooth})
    bounds = [at for at in bounds if at not in {*switched, *returns.waiting}]
    steps = [(_step(fit, at, scale, index), _beside_a_line(fit, at)) for at in bounds]
    if modes is not None and modes.memory + _MEMORY_ERRORS * modes.memory_error < STICKY:
        # Where each value draws its mode, how often it is drawn may change as well.
        mixed = fit_steps(scaled, rules)
        others, _ = _without_spells(mixed, rules.significance)
        apart = [
            at
            for at in others
            if all(
                abs(mixed.segments[at + 1].start - one) > _SAME_STEP * 3
                for one in (fit.segments[b + 1].start for b in bounds)
            )
        ]
        steps += [
            (_step(mixed, at, scale, index, of_share=True), _beside_a_line(mixed, at))
            for at in apart
        ]
        steps.sort(key=lambda one: one[0].index)
    model = LevelModel(
        size=size,
        steps=tuple(one for one, _ in steps),
        drifts=_drifts(fit, scale, index, sawtooth),
        modes=_pair(modes, scale),
        switches=_switches(modes, fit, switched, index),
        spells=tuple(
            Spell(int(index[start]), int(index[stop - 1]) + 1, scale.fraction(effect))
            for start, stop, effect in spells
        ),
        sigma=fit.sigma,
        memory=fit.memory,
        period=0 if season is None else season.period,
        seasonal=0.0 if season is None else scale.fraction(season.depth),
    )
    return model, [beside for _, beside in steps]


def _beside_a_line(fit: Fit, position: int) -> bool:
    return bool(fit.segments[position].slope or fit.segments[position + 1].slope)


def _scaled(usable: Floats) -> tuple[Floats, _Scale]:
    if float(usable.min()) > 0:
        return np.log(usable), _Scale(None)
    unit = float(np.median(np.abs(usable)))
    if unit == 0:
        unit = float(np.abs(usable).max())
    return usable / unit, _Scale(unit)


def _without_spells(fit: Fit, significance: float) -> tuple[list[int], list[Excursion]]:
    """Positions of the boundaries that are steps, and what is a spell.

    A spell is left for the level that it was entered from.
    """
    steps = [i for i, one in enumerate(fit.boundaries) if one.p_value <= significance]
    kept: list[int] = []
    spells: list[Excursion] = []
    for position in steps:
        if kept and kept[-1] == position - 1 and fit.segments[position].size <= LONGEST_SPELL:
            into, back = fit.boundaries[position - 1], fit.boundaries[position]
            if abs(into.effect + back.effect) < min(abs(into.effect), abs(back.effect)) / 4:
                kept.pop()
                short = fit.segments[position]
                spells.append((short.start, short.stop, into.effect))
                continue
        kept.append(position)
    return kept, spells


def _step(fit: Fit, position: int, scale: _Scale, index: Ints, *, of_share: bool = False) -> Step:
    left, right = fit.segments[position], fit.segments[position + 1]
    boundary: Boundary = fit.boundaries[position]
    at = right.start - 0.5
    return Step(
        int(index[right.start]),
        scale.value(left.at(at)),
        scale.value(right.at(at)),
        boundary.p_value,
        of_share,
    )


def _drifts(fit: Fit, scale: _Scale, index: Ints, sawtooth: tuple[int, ...]) -> tuple[Drift, ...]:
    """Lines, those that go on after a step the same way together; not those of a sawtooth."""
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


def _pair(modes: Modes | None, scale: _Scale) -> ModePair | None:
    if modes is None:
        return None
    return ModePair(scale.fraction(modes.gap), modes.share, modes.memory)


def _switches(
    modes: Modes | None, fit: Fit, switched: list[int], index: Ints
) -> tuple[ModeSwitch, ...]:
    """Of two modes that are stayed in, and of levels that the series keeps coming back to."""
    found = [
        ModeSwitch(int(index[one.index]), one.effect > 0)
        for one in (fit.boundaries[at] for at in switched)
    ]
    if modes is not None and modes.memory >= STICKY:
        found += [ModeSwitch(int(index[at]), bool(modes.slow[at])) for at in modes.switches]
    return tuple(sorted(found, key=lambda one: one.index))
