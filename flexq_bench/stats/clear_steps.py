"""Confirmation by earlier looks of the steps that are not clear in one look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flexq_bench.stats.segments import SHORTEST_LINE

# The chance in noise from which on one look at a step is enough, by how many values follow it.
_CLEAR_WHEN_NEW = {3: 3e-4, 4: 8e-4, 5: 2e-3, 6: 2e-3}
_OLDEST_NEW = max(_CLEAR_WHEN_NEW)
_MEMORY_OF_STRICT_TESTS = 0.3  # its doubt makes them strict enough, and a second look late
_CLEAR = 2e-5
_LEAST_WITH_MEMORY = 5e-4  # however often it was there: memory that is underrated lasts for weeks
_CLEAR_BESIDE_A_LINE = 1e-6  # while what follows is too short to be told from a line itself
_MOVES = 3  # values that a step may move by from one look to the next


@dataclass
class EarlierLooks:
    """Looks at a series without its newest values, each made once it is asked for.

    A look every night sees many series that are nearly but not quite steps; most are gone in the
    next. So a step that is not clear by itself must have been there before.

    steps_without: the indices of the steps without so many of the newest values. most: how many
    looks a step is searched in, if its noise has no memory.
    """

    steps_without: Callable[[int], tuple[int, ...]]
    most: int
    _seen: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def confirms(
        self, index: int, age: int, p_value: float, memory: float, *, beside_a_line: bool
    ) -> bool:
        """Return True if the step at an index is clear, or earlier looks found it too.

        age: number of values from the index on. p_value: of the step in noise alone. memory: AR(1)
        coefficient of that noise. beside_a_line: True if one side of the step is a drift.
        """
        if age <= _OLDEST_NEW:
            strict = memory >= _MEMORY_OF_STRICT_TESTS
            return strict or p_value <= _CLEAR_WHEN_NEW[age] or self._had(index, 1)
        # With memory, the next looks see the same. What was there when it was new is not lost.
        since_new = age - _OLDEST_NEW
        looks = min(round(self.most * (1 + memory) / (1 - memory)), since_new)
        if beside_a_line and age <= 2 * SHORTEST_LINE:
            return self._had(index, looks if p_value <= _CLEAR_BESIDE_A_LINE else since_new)
        if memory >= _MEMORY_OF_STRICT_TESTS and p_value > _LEAST_WITH_MEMORY:
            return self._had(index, since_new)
        return p_value <= _CLEAR or self._had(index, looks)

    def _had(self, index: int, looks: int) -> bool:
        return all(
            any(abs(at - index) <= _MOVES for at in self._steps(newest))
            for newest in range(1, looks + 1)
        )

    def _steps(self, newest: int) -> tuple[int, ...]:
        if newest not in self._seen:
            self._seen[newest] = self.steps_without(newest)
        return self._seen[newest]
