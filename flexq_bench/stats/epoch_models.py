"""Level models of a series whose environment changed, one per epoch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.level_model import LevelModel, level_model

_Part = TypeVar("_Part")


def level_model_by_epoch(
    values: ArrayLike,
    epochs: Sequence[Hashable],
    devices: Sequence[Hashable] | None = None,
) -> LevelModel:
    """The steps, spells and changes of device within each epoch, combined.

    values: [n], as `level_model`'s. epochs: [n], of each value; the values of an epoch need not be
    adjacent. Levels are compared only within an epoch. Noise, span of devices and the step that
    waits are those of the newest value's epoch. Raises ValueError if values is not one-dimensional,
    or epochs or devices have another length.
    """
    array = np.asarray(values, dtype=np.float64)
    if len(epochs) != array.size:
        raise ValueError(f"one epoch per value is needed, got {len(epochs)} for {array.size}")
    names = dict.fromkeys(epochs)
    if len(names) < 2:
        return level_model(array, devices)
    models = {}
    for name in names:
        belongs = np.fromiter((one == name for one in epochs), np.bool_, len(epochs))
        # The others become gaps, so that indices are those of the whole series.
        models[name] = level_model(np.where(belongs, array, np.nan), devices)

    def together(parts: Iterable[tuple[_Part, ...]], key: str) -> tuple[_Part, ...]:
        return tuple(sorted(chain.from_iterable(parts), key=attrgetter(key)))

    return replace(
        models[epochs[-1]],
        steps=together((one.steps for one in models.values()), "index"),
        spells=together((one.spells for one in models.values()), "start"),
        device_changes=together((one.device_changes for one in models.values()), "index"),
    )
