"""Change points of a whole series."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.level_model import level_model
from flexq_bench.stats.steps import ANY_SERIES, StepRules

# Smallest change that counts in comparisons: as a fraction of the level before, and as a log ratio.
SMALLEST_CHANGE = 0.01
SMALLEST_LOG_RATIO = float(np.log1p(SMALLEST_CHANGE))


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """Change of the level of a series.

    index: of the first value on the new level, in the series as given.
    mean_before, mean_after: levels next to the change, in the unit of the series; with two modes,
    of the lower one.
    relative_change: mean_after / mean_before - 1.
    p_value: probability of a step this large anywhere in noise alone.
    """

    index: int
    mean_before: float
    mean_after: float
    relative_change: float
    p_value: float


def change_points(
    values: ArrayLike, rules: StepRules = ANY_SERIES, devices: Sequence[Hashable] | None = None
) -> tuple[ChangePoint, ...]:
    """The changes of level of a series, oldest first: the steps of its `level_model`.

    A drift, a switch between two modes, a spell of 3 values and the effect of a device are no
    change points; the level model lists them. devices: [n] the device of each value; None: one
    device. Raises ValueError if values is not one-dimensional, or devices has another length.
    """
    return tuple(
        ChangePoint(one.index, one.before, one.after, one.relative_change, one.p_value)
        for one in level_model(values, rules, devices).steps
    )
