"""Change points of a whole series."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from numpy.typing import ArrayLike

from flexq_bench.stats.level_model import Step, level_model


def change_points(
    values: ArrayLike,
    devices: Sequence[Hashable] | None = None,
    *,
    smallest: float | None = None,
    in_hindsight: bool = False,
) -> tuple[Step, ...]:
    """The changes of level of a series, oldest first: the steps of its `level_model`.

    Arguments and errors are those of `level_model`.
    """
    return level_model(values, devices, smallest=smallest, in_hindsight=in_hindsight).steps
