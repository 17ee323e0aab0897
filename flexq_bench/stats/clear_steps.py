"""Confirmation of steps by earlier looks, if one look is not enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from flexq_bench.stats.segments import SHORTEST_LINE, SHORTEST_SEGMENT

# Largest p-value for which one look at a step is enough, by the number of values after it.
_CLEAR_WHEN_NEW = {3: 3e-4, 4: 8e-4, 5: 2e-3, 6: 2e-3}
_OLDEST_NEW = max(_CLEAR_WHEN_NEW)
# the test allows for this much memory, so it is strict enough, and a second look comes late
_MEMORY_OF_STRICT_TESTS = 0.3
_CLEAR = 2e-5
# for any number of looks: the effect of underestimated memory lasts for weeks
_LEAST_WITH_MEMORY = 5e-4
# while the values after the step are too few to distinguish them from a line
_CLEAR_BESIDE_A_LINE = 1e-6
_MOVES = 3  # values by which the position of a step may differ from one look to the next
_MOST_LOOKS = 40  # at one step: of more, as many that are spread evenly


@dataclass
class EarlierLooks:
    """Looks at a series without its newest values, each computed when it is first needed.

    A look every night sees many series that are almost steps; most are gone in the next look. A
    step with a large p-value must therefore have been present in earlier looks.

    steps_without: function from a number of newest values to the indices of the steps without them.
    most: number of looks that must contain a step, if its noise has no memory.
    """

    steps_without: Callable[[int], tuple[int, ...]]
    most: int
    _seen: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def confirms(
        self,
        index: int,
        age: int,
        p_value: float,
        memory: float,
        *,
        beside_a_line: bool,
        after_spells: bool,
    ) -> bool:
        """Return True if the p-value of a step is small enough, or earlier looks contain the step.

        index: of the step. age: number of values from the index on, up to the last one that is not
        back on the level before it. p_value: of the step in noise alone. memory: AR(1) coefficient
        of that noise. beside_a_line: True if one side of the step is a drift. after_spells: True if
        the series had spells; one of 3 values looks like a step until it ends.
        """
        if age < SHORTEST_SEGMENT + after_spells:
            return False
        if age <= _OLDEST_NEW:
            strict = memory >= _MEMORY_OF_STRICT_TESTS
            return strict or p_value <= _CLEAR_WHEN_NEW[age] or self._had(index, 1)
        # With memory the next looks see nearly the same data. A step that was present when new is
        # kept.
        since_new = age - _OLDEST_NEW
        looks = min(round(self.most * (1 + memory) / (1 - memory)), since_new)
        if beside_a_line and age <= 2 * SHORTEST_LINE:
            return self._had(index, looks if p_value <= _CLEAR_BESIDE_A_LINE else since_new)
        if memory >= _MEMORY_OF_STRICT_TESTS and p_value > _LEAST_WITH_MEMORY:
            return self._had(index, since_new)
        return p_value <= _CLEAR or self._had(index, looks)

    def _had(self, index: int, looks: int) -> bool:
        spread = np.unique(np.linspace(1, looks, min(looks, _MOST_LOOKS)).round().astype(int))
        return all(
            any(abs(at - index) <= _MOVES for at in self._steps(newest))
            for newest in spread.tolist()
        )

    def _steps(self, newest: int) -> tuple[int, ...]:
        if newest not in self._seen:
            self._seen[newest] = self.steps_without(newest)
        return self._seen[newest]
