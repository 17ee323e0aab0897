"""Number of segments that an accuracy gate evaluates, and the least loss they could detect.

A policy with `detect` names the least loss to detect, and the probability of detecting it. Each of
its texts is then judged by a group sequential test of the segments' paired log likelihoods: a pilot
estimates their variance, the variance gives the number of tokens needed, and interim looks end the
test as soon as the outcome is clear (flexq_bench.stats.group_sequential). After that the text's
other limits are checked, and more of it is evaluated until they are decided, too. Tasks use
McNemar's test over all their questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexq_bench.accuracy.results import KL_QUANTILES, MetricResult
from flexq_bench.ci.accuracy_gate.policy import AccuracyPolicy, PerplexityLimit
from flexq_bench.stats import Decision, GroupSequentialTest, TestPlan

PILOT = 10  # segments: fewer give too uncertain a variance
_STEPS = 5  # number of looks up to the segments needed
GROWTH = 0.5  # of the segments, from one look at the other limits to the next

Undecided = Callable[[str, str, Sequence[MetricResult], float], bool]
"""Predicate: a limit of a scheme on a text, other than the planned test's, is ambiguous by these
results; the last argument is the part of its errors that the look may spend."""


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


class PowerSchedule:
    """Evaluates as much of each text as the policy's limits need. See Schedule.

    First it evaluates what the planned test needs, then more until no other limit of the text is
    ambiguous. A look at these limits spends the part of their error probabilities by which the text
    has grown since the previous look. The parts of all looks add up to 1 at the text's end
    (Bonferroni; the power family of Kim and DeMets with power 1), so repeated looks do not increase
    the error probability.

    distinct: returns the distinct segments of a text, and its number of segments. context: tokens
    of a segment. undecided: see Undecided.
    """

    def __init__(
        self,
        policy: AccuracyPolicy,
        distinct: Callable[[str], tuple[Sequence[int], int]],
        context: int,
        undecided: Undecided,
    ) -> None:
        self._plans = text_plans(policy)
        self._tokens_needed = tokens_needed(policy)
        self._distinct = distinct
        self._context = context
        self._undecided = undecided
        # number of segments at each look at other limits
        self._looks: dict[tuple[str, str], list[int]] = {}
        self.tests: dict[tuple[str, str], TextTest] = {}

    def test(self, scheme: str, text: str) -> TextTest | None:
        """The test of a scheme on a text; None: there is no plan for that text."""
        plan = self._plans.get(text)
        if plan is None:
            return None
        if (scheme, text) not in self.tests:
            distinct, count = self._distinct(text)
            state = GroupSequentialTest(plan.test)
            self.tests[scheme, text] = TextTest(plan, distinct, count - len(distinct), state)
        return self.tests[scheme, text]

    def next_count(
        self,
        scheme: str,
        text: str,
        base: Sequence[float],
        head: Sequence[float],
        so_far: Callable[[], Sequence[MetricResult]],
    ) -> int:
        """See Schedule."""
        test = self.test(scheme, text)
        if test is None:  # without a plan the whole text is evaluated
            return 2**62
        if len(head):
            test.add(base, head)
        for_quantiles = math.ceil(self._tokens_needed.get(text, 0) / (self._context - 1))
        required = max(test.required(), for_quantiles)
        if test.decision is Decision.OPEN or required > len(head):
            return required
        self._looks.setdefault((scheme, text), []).append(len(head))
        if self._undecided(scheme, text, so_far(), self.share(scheme, text, len(head))):
            return len(head) + math.ceil(GROWTH * len(head))
        return required

    def share(self, scheme: str, text: str, count: int) -> float:
        """The part of their error probabilities that a look at a text's other limits spends.

        It is the growth of the text since the previous look, relative to the whole text.
        """
        test = self.test(scheme, text)
        if test is None:
            return 1.0
        earlier = [look for look in self._looks.get((scheme, text), ()) if look < count]
        return (count - max(earlier, default=0)) / max(count, test.available)


def text_plans(policy: AccuracyPolicy) -> Mapping[str, TextPlan]:
    """The test of each text with a limit of its perplexity; empty without `detect`.

    alpha is shared with the limits of divergence and agreement (Bonferroni), so it holds for a
    scheme as a whole. Fidelity limits have no share: see checks.judge_fidelity.
    """
    detect = policy.planned.detect
    if detect is None:
        return {}
    alpha = shared_alpha(policy)
    return {
        limit.text: _text_plan(limit, detect, alpha, policy.planned.power)
        for limit in policy.perplexities
    }


def shared_alpha(policy: AccuracyPolicy) -> float:
    """The alpha of each planned test of a scheme; all tests share half of it if there are other
    limits.
    """
    share = 0.5 if _other_limits(policy) else 1.0
    tests = len(policy.perplexities) + len(policy.tasks)
    return share * policy.planned.alpha / max(1, tests)


def limit_alpha(policy: AccuracyPolicy) -> float | None:
    """The alpha of each limit without a planned test; None: nothing is planned."""
    count = _other_limits(policy)
    if policy.planned.detect is None or count == 0:
        return None
    return policy.planned.alpha / 2 / count


def _other_limits(policy: AccuracyPolicy) -> int:
    """Limits of divergence and agreement, each of which can also fail by chance."""
    named = (
        (policy.kl, ("mean", *KL_QUANTILES)),
        (policy.agreement, ("top1", "top5")),
    )
    return sum(getattr(of, key) is not None for of, keys in named if of for key in keys)


def _text_plan(limit: PerplexityLimit, detect: float, alpha: float, power: float) -> TextPlan:
    accepts = limit.percent is not None and limit.percent < detect
    accepted = math.log1p((limit.percent or 0.0) / 100) if accepts else 0.0
    return TextPlan(TestPlan(math.log1p(detect / 100) - accepted, alpha, power), accepted)


def tokens_needed(policy: AccuracyPolicy) -> dict[str, int]:
    """Number of tokens of each text that the quantiles limited by the policy need."""
    limit = policy.kl
    if limit is None:
        return {}
    named = ("median", "p95", "p99", "p999")
    shares = [KL_QUANTILES[name] for name in named if getattr(limit, name) is not None]
    return {limit.text: max((fewest_tokens(share) for share in shares), default=0)}


def fewest_tokens(share: float) -> int:
    """Number of tokens of which on average one lies beyond the quantile of this share."""
    return math.ceil(1 / (1 - share) - 1e-6)
