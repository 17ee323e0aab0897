"""The planned test of the loss on one text, by the losses of its segments so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexq_bench.stats import Decision, GroupSequentialTest, TestPlan

PILOT = 10  # segments: fewer give too uncertain a variance
_STEPS = 5  # number of looks up to the segments needed


@dataclass(frozen=True, slots=True)
class TextPlan:
    """Test of the loss on a text. test: in nats per token beyond the accepted loss `accepted`."""

    test: TestPlan
    accepted: float

    def percent(self, effect: float) -> float:
        """Convert an effect of the test to a loss in percent of the perplexity."""
        return 100 * math.expm1(min(self.accepted + effect, 700.0))


@dataclass(slots=True)
class TextTest:
    """A running test.

    distinct: indices of the segments that count; repeated: number of duplicates, which do not;
    evaluated: number of segments so far; decided_at: number of segments at the decision, which
    later ones do not change.
    """

    plan: TextPlan
    distinct: Sequence[int]
    repeated: int
    state: GroupSequentialTest
    decision: Decision = Decision.OPEN
    evaluated: int = 0
    decided_at: int = 0
    losses: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @property
    def deviation(self) -> float:
        """Standard deviation of the segments' losses; NaN: fewer than two."""
        return float(self.losses.std(ddof=1)) if self.losses.size > 1 else math.nan

    @property
    def available(self) -> int:
        """Number of segments that the text has."""
        return len(self.distinct) + self.repeated

    @property
    def needed(self) -> int:
        """Largest number of segments that the test needs, as estimated so far."""
        if self.losses.size < PILOT:
            return PILOT
        return max(PILOT, self.plan.test.needed(self.deviation))

    @property
    def detectable(self) -> float:
        """The least loss that it could have detected, in percent; infinite: none."""
        if self.decision is not Decision.OPEN:
            return self.plan.percent(self.plan.test.effect)
        if self.losses.size < PILOT:
            return math.inf
        return self.plan.percent(self.plan.test.detectable(self.deviation, self.losses.size))

    def add(self, base: Sequence[float], head: Sequence[float]) -> None:
        """Look at all segments so far: their mean negative log likelihoods under both models."""
        self.evaluated = len(head)
        if self.decision is not Decision.OPEN:
            return
        kept = [i for i in self.distinct if i < len(head)]
        losses = np.asarray(head, dtype=np.float64)[kept] - np.asarray(base)[kept]
        self.losses = losses - self.plan.accepted
        last = self.losses.size == len(self.distinct)
        if self.losses.size >= PILOT:
            if not np.isfinite(self.losses).all():
                self.decision = Decision.ABOVE
            else:
                self.decision = self.state.look(self.losses, last=last)
        if self.decision is not Decision.OPEN:
            self.decided_at = self.evaluated

    def required(self) -> int:
        """Number of segments of the text that the next look needs."""
        if self.decision is not Decision.OPEN:
            return self.evaluated
        have = self.losses.size
        if have < PILOT:
            goal = PILOT
        else:
            goal = min(max(have + math.ceil(self.needed / _STEPS), have + 1), self.needed)
            goal = max(goal, have + 1)
        if goal > len(self.distinct):
            return max(self.evaluated, self.distinct[-1] + 1)
        return self.distinct[goal - 1] + 1
