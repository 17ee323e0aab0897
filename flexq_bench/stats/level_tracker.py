"""A level model that grows with its series, at a cost per value that does not grow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.level_model import (
    Drift,
    LevelModel,
    ModeSwitch,
    Spell,
    Step,
    level_model,
)
from flexq_bench.stats.steps import ANY_SERIES, StepRules

_WINDOW = 400  # values at the end that are analysed again every time
_Indexed = TypeVar("_Indexed", Step, ModeSwitch)


class LevelTracker:
    """The level model of a series that gets values one by one, or many at once.

    Every new value repeats the analysis of the newest 400 to 800 values, so a step among them may
    still be withdrawn; results before them are final. Up to 800 values the model is that of
    `level_model`.
    """

    def __init__(self, rules: StepRules = ANY_SERIES) -> None:
        self._rules = rules
        self._recent: list[float] = []
        self._settled = LevelModel(0)

    def extend(self, values: ArrayLike) -> LevelModel:
        """The model of all values so far and these [n], NaN a gap, oldest first.

        Raises ValueError if values is not one-dimensional.
        """
        new = np.asarray(values, dtype=np.float64)
        if new.ndim != 1:
            raise ValueError(f"a series has one dimension, got {new.ndim}")
        for start in range(0, new.size, _WINDOW):
            self._recent.extend(new[start : start + _WINDOW].tolist())
            if len(self._recent) > 2 * _WINDOW:
                self._settle()
        return self.model

    @property
    def model(self) -> LevelModel:
        """Model of all values so far."""
        return _joined(self._settled, self._look())

    def _look(self) -> LevelModel:
        return level_model(self._recent, self._rules)

    def _settle(self) -> None:
        model = self._look()
        cut = len(self._recent) - _WINDOW
        # The last step before the cut, so that the remaining values start on one level.
        begins = max((step.index for step in model.steps if step.index <= cut), default=cut)
        if begins < cut - _WINDOW // 2:
            begins = cut
        self._settled = _joined(self._settled, _until(model, begins))
        del self._recent[:begins]


def _until(model: LevelModel, end: int) -> LevelModel:
    """Return the part of a model up to and including the index `end`."""
    return replace(
        model,
        size=end,
        steps=tuple(one for one in model.steps if one.index <= end),
        drifts=tuple(
            replace(one, end=min(one.end, end)) for one in model.drifts if one.onset < end
        ),
        switches=tuple(one for one in model.switches if one.index <= end),
        spells=tuple(one for one in model.spells if one.stop <= end),
    )


def _joined(before: LevelModel, after: LevelModel) -> LevelModel:
    """Combine the models of two adjacent parts of a series."""
    offset = before.size
    if offset == 0:
        return after
    moved = tuple(
        replace(one, onset=one.onset + offset, end=one.end + offset) for one in after.drifts
    )
    return replace(
        after,
        size=offset + after.size,
        steps=before.steps + _shifted(after.steps, offset),
        drifts=_together(before.drifts, moved),
        modes=after.modes or before.modes,
        switches=before.switches + _shifted(after.switches, offset),
        spells=before.spells
        + tuple(Spell(one.start + offset, one.stop + offset, one.change) for one in after.spells),
    )


def _shifted(found: Iterable[_Indexed], offset: int) -> tuple[_Indexed, ...]:
    return tuple(replace(one, index=one.index + offset) for one in found)


def _together(before: tuple[Drift, ...], after: tuple[Drift, ...]) -> tuple[Drift, ...]:
    """Merge the last drift of the first part with a drift that continues it in the second."""
    if not before or not after:
        return before + after
    last, first = before[-1], after[0]
    if last.end < first.onset or last.slope * first.slope < 0:
        return before + after
    length = first.end - last.onset
    change = last.change + first.change
    whole = Drift(last.onset, first.end, change / length, change)
    return (*before[:-1], whole, *after[1:])
