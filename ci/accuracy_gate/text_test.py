"""The planned test of the loss on one text, by the losses of its segments so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexq_bench.stats import (
    GROWTH,
    MIN_VALUES,
    Decision,
    TestPlan,
    decide,
    simulated_rates,
)

_MOST_SIMULATED, _DRAWS = 120, 500  # segments and draws of the simulation before a test


@dataclass(frozen=True, slots=True)
class TextPlan:
    """Test of the loss on a text. test: in nats per token beyond the accepted loss `accepted`."""

    test: TestPlan
    accepted: float

    def planned(self, tokens: int) -> int:
        """Least number of segments of so many tokens that a model with the loss to detect needs.

        It is known before an evaluation: of a small change, the log likelihood ratio of a token has
        twice its mean, the divergence, as variance. A model that loses less needs fewer.
        """
        return self.test.planned(math.sqrt(2 * (self.accepted + self.test.effect) / tokens))

    def percent(self, effect: float) -> float:
        """Convert an effect of the test to a loss in percent of the perplexity."""
        return 100 * math.expm1(min(self.accepted + effect, 700.0))


@dataclass(slots=True)
class TextTest:
    """A running test.

    distinct: indices of the segments that count, in the order of evaluation; repeated: number of
    duplicates, which do not; places: each segment's number in the text; evaluated: number of
    segments so far; decided_at: number of segments at the decision, which later ones do not change.
    enough: number of segments that are evaluated if the whole text is too short for the test.
    rates: shares of simulated tests that fail a model without a loss, and that miss it, if the
    losses are distributed as the reference's own; None: not simulated yet.
    """

    plan: TextPlan
    distinct: Sequence[int]
    repeated: int
    places: Sequence[int]
    enough: int = 2**62
    decision: Decision = Decision.OPEN
    evaluated: int = 0
    decided_at: int = 0
    losses: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    rates: tuple[float, float] | None = None

    @property
    def needed(self) -> int:
        """Number of segments that the test needs, as estimated so far."""
        if self.losses.size < 2 or not np.isfinite(self.losses).all():
            return MIN_VALUES
        return int(self.plan.test.needed(self.losses))

    @property
    def available(self) -> int:
        """Number of distinct segments that the test may take."""
        count = len(self.distinct)
        return count if self.needed <= count else min(count, self.enough)

    @property
    def detectable(self) -> float:
        """The least loss that it could have detected, in percent; infinite: none."""
        if self.decision is not Decision.OPEN:
            return self.plan.percent(self.plan.test.effect)
        if self.losses.size < MIN_VALUES:
            return math.inf
        return self.plan.percent(self.plan.test.detectable(self.losses))

    def add(self, base: Sequence[float], head: Sequence[float]) -> None:
        """Look at all segments so far: their mean negative log likelihoods under both models."""
        before, self.evaluated = self.losses.size, len(head)
        if self.decision is not Decision.OPEN:
            return
        kept = [i for i in self.distinct if i < len(head)]
        if before < MIN_VALUES < len(kept):  # the first look is at the planned minimum
            self._look(base, head, kept[:MIN_VALUES])
        if self.decision is Decision.OPEN:
            self._look(base, head, kept)
        if self.decision is not Decision.OPEN:
            self.decided_at = self.evaluated

    def _look(self, base: Sequence[float], head: Sequence[float], kept: list[int]) -> None:
        in_order = sorted(kept, key=lambda i: self.places[i])
        losses = np.asarray(head, dtype=np.float64)[in_order] - np.asarray(base)[in_order]
        first = self.losses.size < MIN_VALUES
        self.losses = losses - self.plan.accepted
        last = len(kept) >= self.available
        if not np.isfinite(self.losses).all():
            self.decision = Decision.ABOVE
        elif self.losses.size > 1:
            first &= self.losses.size == MIN_VALUES
            self.decision = decide(self.plan.test, self.losses, first=first, last=last)
        if self.rates is None and len(kept) >= MIN_VALUES:
            own = np.asarray(base, dtype=np.float64)[in_order]
            most = min(len(self.distinct), _MOST_SIMULATED)
            self.rates = simulated_rates(self.plan.test, own, most, seed=0, draws=_DRAWS)

    def required(self) -> int:
        """Number of segments of the text that the next look needs."""
        if self.decision is not Decision.OPEN:
            return self.evaluated
        goal = max(MIN_VALUES, math.ceil(GROWTH * self.losses.size))
        goal = min(goal, self.available)
        return max(self.evaluated, self.distinct[goal - 1] + 1)
