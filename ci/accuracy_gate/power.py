"""Number of segments that an accuracy gate evaluates, and the least loss they could detect.

A policy with `detect` names the least loss to detect, and the probability of detecting it. Each of
its texts is then judged by a test of the segments' paired log likelihoods, in the random order of a
planned sample: the first look is at MIN_VALUES segments, whose variance gives the number needed
(flexq_bench.stats.planned_mean). After that the text's other limits are checked, and more of it is
evaluated until they are decided, too. Tasks use McNemar's test over all their questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence

from flexq_bench.accuracy.results import MetricResult
from flexq_bench.ci.accuracy_gate.contract import AccuracyPolicy
from flexq_bench.ci.accuracy_gate.text_test import TextTest
from flexq_bench.stats import GROWTH, MIN_VALUES, Decision

Undecided = Callable[[str, str, Sequence[MetricResult], float], bool]
"""Predicate: a limit of a scheme on a text, other than the planned test's, is ambiguous by these
results; the last argument is the part of its errors that the look may spend."""


class PowerSchedule:
    """Evaluates as much of each text as the policy's limits need. See Schedule.

    First it evaluates what the planned test needs, then, if that does not fail, more until no other
    limit of the text is ambiguous. A look at these limits spends the part of their error
    probabilities by which the text has grown since the previous look. The parts of all looks add up
    to 1 at the text's end (Bonferroni; the power family of Kim and DeMets with power 1), so
    repeated looks do not increase the error probability.

    distinct: returns the distinct segments of a text, and its number of segments. places: returns
    each segment's number in the text. context: returns the tokens of a segment. enough: returns the
    number of segments that only a planned test may exceed. undecided: see Undecided.
    """

    def __init__(
        self,
        policy: AccuracyPolicy,
        distinct: Callable[[str], tuple[Sequence[int], int]],
        places: Callable[[str], Sequence[int]],
        context: Callable[[str], int],
        enough: Callable[[str], int],
        undecided: Undecided,
    ) -> None:
        self._plans = policy.text_plans()
        self._tokens_needed = policy.tokens_needed()
        self._distinct, self._places, self._context = distinct, places, context
        self._enough, self._undecided = enough, undecided
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
            repeated, places = count - len(distinct), self._places(text)
            self.tests[scheme, text] = TextTest(
                plan, distinct, repeated, places, self._enough(text)
            )
        return self.tests[scheme, text]

    def short_texts(self, texts: Container[str]) -> Iterator[str]:
        """Yield a warning for each of these texts that is shorter than its test may need."""
        for text, plan in self._plans.items():
            if text not in texts:
                continue
            count = len(self._distinct(text)[0])
            planned = plan.planned(self._context(text) - 1)
            if count < MIN_VALUES:
                yield (
                    f"{text} has {count} segments, its test needs {MIN_VALUES}: it can fail, but "
                    "not pass; give a longer text"
                )
            elif count < planned:
                detect, accepted = plan.percent(plan.test.effect), plan.percent(0.0)
                yield (
                    f"{text} has {count} segments: to tell a loss of {detect:.3g} % from "
                    f"{accepted:.3g} % takes {planned} or more, unless a scheme changes little; "
                    "else it is not judged"
                )

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
        if test is None:
            return self._enough(text)
        if len(head):
            test.add(base, head)
        for_quantiles = math.ceil(self._tokens_needed.get(text, 0) / (self._context(text) - 1))
        required = max(test.required(), for_quantiles)
        if test.decision is not Decision.BELOW or required > len(head):
            return required  # once the test fails, more of the text changes no verdict
        self._looks.setdefault((scheme, text), []).append(len(head))
        if self._undecided(scheme, text, so_far(), self.share(scheme, text, len(head))):
            return max(required, min(self._enough(text), math.ceil(GROWTH * len(head))))
        return required

    def share(self, scheme: str, text: str, count: int) -> float:
        """The part of their error probabilities that a look at a text's other limits spends.

        It is the growth of the text since the previous look, relative to all that such looks get.
        """
        test = self.test(scheme, text)
        if test is None:
            return 1.0
        earlier = [look for look in self._looks.get((scheme, text), ()) if look < count]
        return (count - max(earlier, default=0)) / max(count, self._enough(text))
