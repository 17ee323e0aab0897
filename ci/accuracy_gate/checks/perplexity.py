"""Perplexity of a text: its increase by a planned test or a limit, and its value by a limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from flexq_bench.accuracy.results import PERPLEXITY, MetricDifference, MetricResult, difference
from flexq_bench.accuracy.stored_reference import StoredReference
from flexq_bench.ci.accuracy_gate.contract import (
    ALL_TOKENS,
    Check,
    CheckContext,
    LimitOutcome,
    NotJudgedError,
    PlannedPower,
    check_any,
)
from flexq_bench.ci.accuracy_gate.judging import NO_INTERVAL
from flexq_bench.ci.accuracy_gate.results import SchemeResults
from flexq_bench.ci.accuracy_gate.text_test import TextPlan, TextTest
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.stats import Decision, TestPlan
from flexq_bench.workloads.data_files import Amount, DataTable, Text

_MAX_POWER_LOST = 0.05  # in a simulation, see TextTest.rates: less may be chance


class PerplexityLimit(DataTable):
    """Limits of a perplexity on a text, and of its increase; None: not limited.

    detect: the least loss to detect on this text, in percent; None: the policy's.
    """

    text: Text
    at_most: Amount | None = None
    increase: Amount | None = None
    percent: Amount | None = None
    upper_percent: Amount | None = None
    detect: Amount | None = None


class PerplexityCheck(Check[PerplexityLimit]):
    """The increase of a text's perplexity, and the perplexity itself over all of the text."""

    key, table, repeated, planned = "perplexity", PerplexityLimit, True, True

    def names(self, limit: PerplexityLimit) -> tuple[str, ...]:
        absolute = () if limit.at_most is None else (_absolute(limit),)
        return (f"perplexity of {limit.text}", *absolute)

    def texts(self, limit: PerplexityLimit) -> tuple[str, ...]:
        return (limit.text,)

    def tests(self, limit: PerplexityLimit) -> int:
        return 1

    def check_table(self, limit: PerplexityLimit, power: PlannedPower) -> None:
        if power.detect is None:  # else the planned test is a limit itself
            check_any(limit)

    def tokens_needed(self, limit: PerplexityLimit) -> int:
        return 0 if limit.at_most is None else ALL_TOKENS

    def text_plan(
        self, limit: PerplexityLimit, power: PlannedPower, alpha: float
    ) -> TextPlan | None:
        if power.detect is None:
            return None
        detect = limit.detect or power.detect
        accepts = limit.percent is not None and limit.percent < detect
        accepted = math.log1p((limit.percent or 0.0) / 100) if accepts else 0.0
        effect = math.log1p(detect / 100) - accepted
        return TextPlan(TestPlan(effect, alpha, power.power), accepted)

    def judge(self, limit: PerplexityLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        test = context.tests.get(limit.text)
        # The planned test leaves repeated segments out itself.
        results = context.results if test is None else context.every_result
        planned = context.policy.planned
        increase = limit != PerplexityLimit(text=limit.text, at_most=limit.at_most)
        if increase or planned.detect is not None:
            yield judge_increase(limit, results, planned, test)
        if limit.at_most is not None:
            yield _judge_absolute(limit, context)


def _absolute(limit: PerplexityLimit) -> str:
    return f"absolute perplexity of {limit.text}"


def judge_increase(
    limit: PerplexityLimit, results: SchemeResults, planned: PlannedPower, test: TextTest | None
) -> LimitOutcome:
    """Judge the increase of a perplexity. test: the planned one; None: there is no plan.

    Raises NotJudgedError if a text was not evaluated, or not enough of it.
    """
    words = _in_words(limit, planned if test is not None else None)
    decided = partial(
        LimitOutcome, results.scheme, f"perplexity of {limit.text}", limit=words, text=limit.text
    )
    first, second = results.pair(limit.text, PERPLEXITY)
    if broken := results.broken(first, second):
        return decided(GateOutcome.FAIL, broken, base=None if first is None else first.value)
    if first is None or second is None or first.value is None or second.value is None:
        raise NotJudgedError(results.lacking(limit.text))
    paired = difference(first, second)
    outcome, reason = _outcome(limit, first.value, second.value, paired, test, second)
    return decided(
        outcome,
        reason,
        details=_simulated(test),
        base=first.value,
        value=second.value,
        change=100 * (second.value / first.value - 1),
        low=None if paired is None else 100 * paired.interval.low,
        high=None if paired is None else 100 * paired.interval.high,
        unit="%",
        detectable=_finite(
            _detectable(first, second, planned) if test is None else test.detectable
        ),
    )


def _outcome(
    limit: PerplexityLimit,
    before: float,
    after: float,
    paired: MetricDifference | None,
    test: TextTest | None,
    head: MetricResult,
) -> tuple[GateOutcome, str]:
    increase, percent = after - before, 100 * (after / before - 1)
    if limit.increase is not None and increase > limit.increase:
        return GateOutcome.FAIL, f"grew by {increase:.3g}"
    if test is not None:  # the policy's `detect` replaces its percentages
        return _planned_outcome(test, head)
    if limit.percent is not None and percent > limit.percent:
        return GateOutcome.FAIL, f"grew by {percent:.3g} %"
    if limit.upper_percent is None:
        return GateOutcome.PASS, ""
    if percent > limit.upper_percent:
        return GateOutcome.FAIL, f"grew by {percent:.3g} %"
    if paired is None:
        return GateOutcome.AMBIGUOUS, NO_INTERVAL
    upper = 100 * paired.interval.high
    if upper > limit.upper_percent:
        return GateOutcome.AMBIGUOUS, f"may have grown by {upper:.3g} %: more tokens are needed"
    return GateOutcome.PASS, "" if paired.clear else "smaller than its interval"


def _planned_outcome(test: TextTest, head: MetricResult) -> tuple[GateOutcome, str]:
    segment = head.n_items // max(1, len(head.values))
    used = f"{test.decided_at * segment:,} tokens"
    if test.decision is Decision.ABOVE:
        accepted = test.plan.percent(0.0)
        than = f"more than {accepted:.3g} %" if accepted else "a loss"
        return GateOutcome.FAIL, f"{than}, clear after {used}"
    rates = f"power {100 * test.plan.test.power:g} %, alpha {100 * test.plan.test.alpha:.2g} %"
    if test.decision is Decision.BELOW:
        missed = 0.0 if test.rates is None else test.rates[1]
        if missed > 1 - test.plan.test.power + _MAX_POWER_LOST:
            lost = f"losses like the reference's own are missed in {100 * missed:.0f} % of cases"
            return GateOutcome.AMBIGUOUS, f"{lost}, planned is {rates}"
        return GateOutcome.PASS, f"{used} show a loss of {test.detectable:.3g} % ({rates})"
    of_text = len(test.distinct)
    reason = f"needs {test.needed * segment:,} tokens, has {of_text * segment:,}"
    if test.repeated:
        reason += f" (in addition to {test.repeated} duplicate segments)"
    reason += f", of which {test.losses.size * segment:,} "
    if math.isfinite(test.detectable):
        reason += f"show a loss of {test.detectable:.3g} % ({rates})"
    else:
        reason += "were evaluated"
    if test.needed > of_text:
        reason += ": give a longer text"
    return GateOutcome.NOT_JUDGED, reason


def _simulated(test: TextTest | None) -> tuple[str, ...]:
    if test is None or test.rates is None:
        return ()
    false_alarms, missed = (100 * rate for rate in test.rates)
    planned = test.plan.test
    return (
        f"simulated on the reference's own losses, {false_alarms:.2g} % "
        f"false alarms and {missed:.2g} % missed; planned {100 * planned.alpha:.2g} and "
        f"{100 * (1 - planned.power):.2g} %",
    )


def _judge_absolute(limit: PerplexityLimit, context: CheckContext) -> LimitOutcome:
    """Judge the perplexity over all segments: that of some depends on which they are."""
    results, text = context.every_result, limit.text
    assert limit.at_most is not None  # the caller checks
    words = f"at most {limit.at_most:g}"
    decided = partial(LimitOutcome, context.scheme, _absolute(limit), limit=words, text=text)
    result = results.find(context.scheme, text, PERPLEXITY)
    if result is None or result.value is None:
        if broken := results.broken(result, result):
            return decided(GateOutcome.FAIL, broken)
        raise NotJudgedError(results.lacking(text))
    _check_reference(context, text)
    available, evaluated = context.distinct[text][1], len(result.values)
    segment = result.n_items // max(1, evaluated)
    if evaluated < available:
        raise NotJudgedError(
            f"it is of all {available * segment:,} tokens, {result.n_items:,} were evaluated"
        )
    outcome = GateOutcome.FAIL if result.value > limit.at_most else GateOutcome.PASS
    return decided(outcome, "", value=result.value)


def _check_reference(context: CheckContext, text: str) -> None:
    """Raise NotJudgedError if a stored reference shortens a text."""
    setup, most = context.setup, context.policy.max_tokens
    reference = setup.evaluator.reference
    if not isinstance(reference, StoredReference):
        return
    if any(reference.is_part(given, most) for given in setup.plan.texts if given.name == text):
        raise NotJudgedError(f"it is of all tokens, the stored reference has a part of {text}")


def _detectable(first: MetricResult, second: MetricResult, planned: PlannedPower) -> float:
    """Return the least detectable loss, in percent, of a limit without a planned test.

    See LimitOutcome. Infinite: fewer than two paired segments, or no loss is small enough.
    """
    count = len(second.values)
    if count < 2 or len(first.values) != count:
        return math.inf
    plan = TestPlan(1.0, planned.alpha, planned.power)
    effect = plan.detectable(np.subtract(second.values, first.values))
    return 100 * math.expm1(effect) if effect < 1 else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _in_words(limit: PerplexityLimit, planned: PlannedPower | None) -> str:
    parts = [(limit.increase, "+{:g}")]
    if planned is None:
        parts += [(limit.percent, "+{:g} %"), (limit.upper_percent, "interval below +{:g} %")]
    else:
        parts += [(limit.detect or planned.detect, "no loss of {:g} %")]
    return ", ".join(form.format(value) for value, form in parts if value is not None)
