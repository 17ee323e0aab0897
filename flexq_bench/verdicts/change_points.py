"""The change points of a series: the one service that detection, alerts, pages and `detect` read.

The statistics are in `flexq_bench.stats`; this module applies them to the points of a series.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np

from flexq_bench.db.units import COUNT, DIFFERENCE, RATIO, scale_of
from flexq_bench.stats.follower import SETTLED
from flexq_bench.stats.level_model import LevelModel, Step, level_model
from flexq_bench.stats.log_series import SMALLEST_CHANGE
from flexq_bench.verdicts.differences import steps_from_constant

# values by which the position of a step may differ from one analysis to the next
REACH = 5
_LASTING = (
    "not decided: a series that switches between two levels could look so; "
    f"{SETTLED // 2} values of either level decide, more if it was at both before"
)
_SMALLEST_OF_COUNT = 0.005  # of the level; some bytes more of a megabyte are no change
_NEARBY = 10  # values within which another step is named as the one that replaced a withdrawn one


class Scale(StrEnum):
    """Comparison of the values of a metric."""

    RATIO = RATIO  # times and rates: positive, changes are factors
    COUNT = COUNT  # 0 is allowed; changes are differences, of at least 0.5 % of the level
    DIFFERENCE = DIFFERENCE  # signed values: as counts, of any size

    @classmethod
    def of(cls, metric: str, unit: str) -> Scale:
        """Return the scale of a metric in a unit (`db.units`)."""
        return cls(scale_of(metric, unit))


@dataclass(frozen=True, slots=True)
class Point:
    """One commit of a series.

    value: in the unit of the series; with several results, their median. device: that measured it.
    epoch: levels are compared only within one; its points need not be adjacent. reruns: the several
    results, whose spread is evidence of noise.
    """

    value: float
    device: Hashable = None
    epoch: Hashable = None
    reruns: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A change of level. index: of the first point on the new level.

    before, after: medians next to the change, in the unit of the series. p_value: probability of a
    change this large anywhere in noise alone.
    """

    index: int
    before: float
    after: float
    p_value: float

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def relative(self) -> float:
        """after / before - 1; infinite from a level of 0."""
        if self.before == 0:
            return math.copysign(math.inf, self.after)
        return (self.after - self.before) / abs(self.before)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A change that is not decided yet; reason: what is missing, in words."""

    change: Change
    reason: str


@dataclass(frozen=True, slots=True)
class ChangePoints:
    """Result for a series. model: its other components (spells, devices, noise).

    waiting, and the noise and the span of devices of the model, are those of the newest epoch.
    """

    steps: tuple[Change, ...]
    waiting: tuple[Waiting, ...]
    model: LevelModel

    @property
    def with_waiting(self) -> tuple[Change, ...]:
        """The steps and, after them, the changes that wait: what a reader of a plot sees."""
        return (*self.steps, *(one.change for one in self.waiting))


def find_change_points(
    points: Sequence[Point],
    scale: Scale = Scale.RATIO,
    *,
    smallest: float | None = None,
    in_hindsight: bool = False,
) -> ChangePoints:
    """The changes of level of a series of points, oldest first, one per commit.

    smallest: change that counts, a fraction of the level (`Scale.RATIO`) or in the unit of the
    series; None: 0.01 or any, and a share of the range of the levels. in_hindsight: by all values,
    for readers of a finished history; otherwise a longer history leaves what was decided. NaN and
    infinite values are gaps, and with `Scale.RATIO` those that are not positive.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, point in enumerate(points):
        places[point.epoch].append(place)
    if len(places) < 2:
        return _of_epoch(points, scale, smallest, in_hindsight)
    found = {
        epoch: _at(_of_epoch([points[place] for place in own], scale, smallest, in_hindsight), own)
        for epoch, own in places.items()
    }
    models = [one.model for one in found.values()]
    newest = found[points[-1].epoch]
    model = replace(
        newest.model,
        size=len(points),
        spells=tuple(sorted((s for one in models for s in one.spells), key=lambda s: s.start)),
        device_changes=tuple(
            sorted((c for one in models for c in one.device_changes), key=lambda c: c.index)
        ),
    )
    steps = sorted((step for one in found.values() for step in one.steps), key=lambda s: s.index)
    return ChangePoints(tuple(steps), newest.waiting, model)


def _at(found: ChangePoints, places: Sequence[int]) -> ChangePoints:
    """Return the result for some points of a series with indices of the series: their places."""
    model = replace(
        found.model,
        spells=tuple(
            replace(spell, start=places[spell.start], stop=places[spell.stop - 1] + 1)
            for spell in found.model.spells
        ),
        device_changes=tuple(
            replace(one, index=places[one.index]) for one in found.model.device_changes
        ),
    )
    waiting = (
        replace(one, change=replace(one.change, index=places[one.change.index]))
        for one in found.waiting
    )
    steps = (replace(step, index=places[step.index]) for step in found.steps)
    return ChangePoints(tuple(steps), tuple(waiting), model)


def _of_epoch(
    points: Sequence[Point], scale: Scale, smallest: float | None, in_hindsight: bool
) -> ChangePoints:
    is_ratio = scale is Scale.RATIO
    least = smallest
    if least is None:
        least = SMALLEST_CHANGE if is_ratio else 0.0
    values = [point.value if not is_ratio or point.value > 0 else math.nan for point in points]
    model = level_model(
        values,
        [point.device for point in points],
        smallest=smallest,
        as_differences=not is_ratio,
        in_hindsight=in_hindsight,
        reruns=[point.reruns for point in points],
    )
    changes = [_change(step) for step in model.steps]
    if not is_ratio:
        changes = _differences(values, changes)
    steps = tuple(change for change in changes if _size(change, scale) >= least)
    waiting = () if model.waiting is None else (Waiting(_change(model.waiting), _LASTING),)
    return ChangePoints(steps, waiting, model)


def _change(step: Step) -> Change:
    return Change(step.index, step.before, step.after, step.p_value)


def _differences(values: Sequence[float], found: Sequence[Change]) -> list[Change]:
    """Return the changes with medians as levels, and exact ones of constant levels."""
    p_values = {change.index: change.p_value for change in found}
    for index in steps_from_constant(values):
        if all(abs(index - change.index) > REACH for change in found):
            p_values[index] = 0.0
    ends = [0, *sorted(p_values), len(values)]
    levels = [float(np.nanmedian(values[a:b])) for a, b in pairwise(ends) if b > a]
    return [
        Change(index, before, after, p_values[index])
        for index, (before, after) in zip(sorted(p_values), pairwise(levels), strict=True)
        if before != after
    ]


def _size(change: Change, scale: Scale) -> float:
    if scale is Scale.COUNT and abs(change.relative) < _SMALLEST_OF_COUNT:
        return -1.0
    return abs(change.relative if scale is Scale.RATIO else change.difference)


def reason_without_step(found: ChangePoints, index: int, *, rises: bool) -> str:
    """Explain in words why there is no step at an index of a series, the nearest cause first.

    rises: True if the step led to larger values.
    """
    if any(abs(change.index - index) <= REACH for change in found.model.device_changes):
        return "the level changed with the device"
    for spell in found.model.spells:
        if spell.start - REACH <= index <= spell.stop + REACH:
            return f"the level was back after {spell.stop - spell.start} results"
    apart = [step.index - index for step in found.steps if (step.difference > 0) == rises]
    nearest = min(apart, key=abs, default=_NEARBY + 1)
    if abs(nearest) <= _NEARBY:
        return f"later results place the step {nearest:+d} results from here"
    return "later results do not bear it out"
