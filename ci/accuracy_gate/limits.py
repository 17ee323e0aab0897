"""Comparison of results with the limits of an accuracy policy: one outcome each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexq_bench.accuracy.results import (
    KL,
    KL_QUANTILES,
    PERPLEXITY,
    TOP1,
    TOP5,
    MetricDifference,
    MetricResult,
    difference,
    kl_metric,
)
from flexq_bench.accuracy.tasks import task_name as name_of_task
from flexq_bench.ci.accuracy_gate.policy import (
    AccuracyPolicy,
    AgreementLimit,
    KlLimit,
    PerplexityLimit,
    PlannedPower,
    TaskLimit,
)
from flexq_bench.ci.accuracy_gate.power import TextTest, fewest_tokens, shared_alpha
from flexq_bench.ci.accuracy_gate.segments import find, shortened, without_repeats
from flexq_bench.ci.gate_perf import Outcome
from flexq_bench.stats import (
    Decision,
    Interval,
    TestPlan,
    detectable_loss,
    item_difference,
    loss_p_value,
    mean_difference_interval,
    questions_needed,
    wider_than_95,
)

_ROUNDING = 1e-9  # tolerance of a value relative to its limit
_ONE_SEGMENT = "one segment has no interval: evaluate more tokens"


@dataclass(frozen=True, slots=True)
class LimitOutcome:
    """One limit of the policy for one scheme.

    change, low, high: in `unit`; None: not judged, for the given reason. limit: in words.
    detectable: the least loss that these data can detect with the policy's power and alpha, in
    `unit`; None: not defined for such a limit, or no loss is small enough. too_few: it is missing
    because there are too few data.
    """

    scheme: str
    check: str  # for example "perplexity of wikitext", "acc of piqa", "parity of kernels"
    outcome: Outcome
    reason: str
    limit: str
    base: float | None = None
    value: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    detectable: float | None = None
    too_few: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """Results that limits are applied to: those of a scheme and of its base.

    absent: texts and tasks that were not evaluated, with the reason. failure: why the scheme has no
    results at all; empty: it has. own: results of the original quantized here by the scheme, by
    text; if a text is not in it, `unknown` has the reason.
    """

    scheme: str
    base: str
    results: Sequence[MetricResult]
    absent: Mapping[str, str]
    failure: str = ""
    own: Mapping[str, Sequence[MetricResult]] | None = None
    unknown: str = ""

    def find(self, scheme: str, task: str, metric: str) -> MetricResult | None:
        """The result of this metric, if there is one."""
        return find(self.results, scheme, task, metric)

    def pair(self, task: str, metric: str) -> tuple[MetricResult | None, MetricResult | None]:
        """The base's result and the scheme's, on their common segments."""
        first, second = self.find(self.base, task, metric), self.find(self.scheme, task, metric)
        if first is None or second is None or metric != PERPLEXITY:
            return first, second
        return shortened(first, len(second.values)), second

    def without_repeats(self, distinct: Mapping[str, tuple[Sequence[int], int]]) -> Judged:
        """The same results on the distinct segments of each text.

        distinct: by text, the indices of these segments, and the number of all.
        """

        def kept(results: Sequence[MetricResult]) -> list[MetricResult]:
            return [
                without_repeats(one, *distinct[one.task]) if one.task in distinct else one
                for one in results
            ]

        own = self.own and {text: kept(results) for text, results in self.own.items()}
        return replace(self, results=kept(self.results), own=own)

    def lacking(self, name: str, first: MetricResult | None, second: MetricResult | None) -> str:
        """Explain why there is nothing to judge; empty: there are results."""
        if first is not None and first.value is not None and second is not None:
            return "" if second.value is not None else second.detail
        return self.failure or self.absent.get(name, "no result arrived")


def deciding(judged: Iterable[LimitOutcome]) -> list[Outcome]:
    """The outcomes that determine the verdict.

    A missing result outweighs all others. If only one limit has too few data, however, a regression
    of another limit decides.
    """
    outcomes = list(judged)
    fails = any(one.outcome is Outcome.REGRESSION for one in outcomes)
    return [one.outcome for one in outcomes if not (fails and one.too_few)]


def judge_text(
    limit: PerplexityLimit, judged: Judged, planned: PlannedPower, test: TextTest | None
) -> LimitOutcome:
    """Judge the perplexity of a text. test: the planned one; None: there is no plan."""
    check = f"perplexity of {limit.text}"
    words = _in_words(limit, planned if test is not None else None)
    first, second = judged.pair(limit.text, PERPLEXITY)
    broken = failure_reason(judged, first, second)
    if broken or first is None or second is None or first.value is None or second.value is None:
        outcome = Outcome.REGRESSION if broken else Outcome.MISSING
        base = None if first is None else first.value
        reason = broken or judged.lacking(limit.text, first, second)
        return LimitOutcome(judged.scheme, check, outcome, reason, words, base=base)
    paired = difference(first, second)
    outcome, reason = _text_outcome(limit, first.value, second.value, paired, test, second)
    return LimitOutcome(
        judged.scheme,
        check,
        outcome,
        reason,
        words,
        base=first.value,
        value=second.value,
        change=100 * (second.value / first.value - 1),
        low=None if paired is None else 100 * paired.interval.low,
        high=None if paired is None else 100 * paired.interval.high,
        unit="%",
        detectable=_finite(
            _detectable(first, second, planned) if test is None else test.detectable
        ),
        too_few=outcome is Outcome.MISSING,
    )


def _text_outcome(
    limit: PerplexityLimit,
    before: float,
    after: float,
    paired: MetricDifference | None,
    test: TextTest | None,
    head: MetricResult,
) -> tuple[Outcome, str]:
    increase, percent = after - before, 100 * (after / before - 1)
    if limit.at_most is not None and after > limit.at_most:
        return Outcome.REGRESSION, f"is {after:.4g}"
    if limit.increase is not None and increase > limit.increase:
        return Outcome.REGRESSION, f"grew by {increase:.3g}"
    if test is not None:  # the policy's `detect` replaces its percentages
        return _planned_outcome(test, head)
    if limit.percent is not None and percent > limit.percent:
        return Outcome.REGRESSION, f"grew by {percent:.3g} %"
    if limit.upper_percent is None:
        return Outcome.PASS, ""
    if percent > limit.upper_percent:
        return Outcome.REGRESSION, f"grew by {percent:.3g} %"
    if paired is None:
        return Outcome.AMBIGUOUS, _ONE_SEGMENT
    upper = 100 * paired.interval.high
    if upper > limit.upper_percent:
        return Outcome.AMBIGUOUS, f"may have grown by {upper:.3g} %: more tokens are needed"
    return Outcome.PASS, "" if paired.clear else "smaller than its interval"


def _planned_outcome(test: TextTest, head: MetricResult) -> tuple[Outcome, str]:
    segment = head.n_items // max(1, len(head.values))
    used = f"{test.decided_at * segment:,} tokens"
    if test.decision is Decision.ABOVE:
        accepted = test.plan.percent(0.0)
        than = f"more than {accepted:.3g} %" if accepted else "a loss"
        return Outcome.REGRESSION, f"{than}, clear after {used}"
    rates = f"power {100 * test.plan.test.power:g} %, alpha {100 * test.plan.test.alpha:.2g} %"
    if test.decision is Decision.BELOW:
        return Outcome.PASS, f"{used} show a loss of {test.detectable:.3g} % ({rates})"
    reason = f"needs {test.needed * segment:,} tokens, has {test.losses.size * segment:,}"
    if test.repeated:
        reason += f" (in addition to {test.repeated} duplicate segments)"
    if math.isfinite(test.detectable):
        reason += f", which show a loss of {test.detectable:.3g} % ({rates})"
    return Outcome.MISSING, f"{reason}: give a longer text"


def _detectable(first: MetricResult, second: MetricResult, planned: PlannedPower) -> float:
    """Return the least detectable loss, in percent, of a limit without a planned test.

    See LimitOutcome. Infinite: fewer than two paired segments, or no loss is small enough.
    """
    count = len(second.values)
    if count < 2 or len(first.values) != count:
        return math.inf
    deviation = float(np.std(np.subtract(second.values, first.values), ddof=1))
    plan = TestPlan(1.0, planned.alpha, planned.power)
    effect = plan.detectable(deviation, count)
    return 100 * math.expm1(effect) if effect < 1 else math.inf


def judge_task(limit: TaskLimit, judged: Judged, policy: AccuracyPolicy) -> LimitOutcome:
    """Judge the metric of a task: within its margin, by the interval or by a planned test."""
    name = name_of_task(limit.name)
    check = f"{limit.metric} of {name}"
    words = f"-{limit.margin_points:g} points"
    if limit.at_least is not None:
        words += f", at least {limit.at_least:g}"
    first, second = (judged.find(s, name, limit.metric) for s in (judged.base, judged.scheme))
    paired = None if first is None or second is None else difference(first, second)
    if first is None or second is None or paired is None:
        if judged.failure:
            return LimitOutcome(judged.scheme, check, Outcome.REGRESSION, judged.failure, words)
        reason = _no_pair(limit, name, judged)
        return LimitOutcome(judged.scheme, check, Outcome.MISSING, reason, words)
    sign = 1 if first.direction == "higher" else -1
    low, high = sorted((100 * sign * paired.interval.low, 100 * sign * paired.interval.high))
    change = 100 * sign * paired.interval.estimate
    binary = paired.p_value is not None
    detectable = _detectable_points(first, second, policy) if binary else None
    if limit.at_least is not None and paired.value < limit.at_least:
        outcome, reason = Outcome.REGRESSION, f"is {paired.value:.4g}"
    elif policy.planned.detect is not None and binary:
        outcome, reason = _planned_task(limit, first, second, policy)
    elif change < -limit.margin_points:
        outcome, reason = Outcome.REGRESSION, f"worse by {-change:.3g} points"
    elif low < -limit.margin_points:
        outcome = Outcome.AMBIGUOUS
        reason = f"may be worse by {-low:.3g} points{_would_tell(detectable, second.n_items)}"
    else:
        outcome, reason = Outcome.PASS, "" if paired.clear else "smaller than its interval"
    return LimitOutcome(
        judged.scheme,
        check,
        outcome,
        reason,
        words,
        base=paired.base,
        value=paired.value,
        change=change,
        low=low,
        high=high,
        unit="points",
        detectable=detectable,
        too_few=outcome is Outcome.MISSING,
    )


def _no_pair(limit: TaskLimit, name: str, judged: Judged) -> str:
    known = sorted({f.metric for f in judged.results if f.task == name})
    if known and limit.metric not in known:
        return f"{name} has no {limit.metric}: there are {', '.join(known)}"
    if known:
        return "too few questions to compare"
    return judged.absent.get(limit.name, "no result arrived")


def _would_tell(detectable: float | None, count: int) -> str:
    if detectable is None:
        return ": more questions are needed"
    return f": {count:,} questions show a loss of {detectable:.3g} points"


def _losses(first: MetricResult, second: MetricResult) -> tuple[int, int]:
    """Numbers of questions that only the base, and only the scheme, answers correctly."""
    items = item_difference(first.values, second.values)
    pair = items.only_base, items.only_head
    return pair if first.direction == "higher" else (pair[1], pair[0])


def _discordant(lost: int, won: int, count: int) -> float:
    """Share of questions answered differently, with Bonett and Price's adjustment for small
    numbers.
    """
    return (lost + won + 2) / (count + 2)


def _planned_task(
    limit: TaskLimit, first: MetricResult, second: MetricResult, policy: AccuracyPolicy
) -> tuple[Outcome, str]:
    lost, won = _losses(first, second)
    count, alpha, power = len(second.values), shared_alpha(policy), policy.planned.power
    p_value = loss_p_value(lost, won)
    points = max(limit.margin_points, 1e-6)
    discordant = _discordant(lost, won, count)
    needed = questions_needed(discordant, min(points / 100, 0.999), alpha=alpha, power=power)
    if p_value <= alpha:
        return Outcome.REGRESSION, f"{lost} questions lost, {won} won, p {p_value:.2g}"
    if count < needed:
        seen = 100 * detectable_loss(discordant, count, alpha=alpha, power=power)
        shows = f", which show a loss of {seen:.3g} points" if seen < 100 else ""
        return (
            Outcome.MISSING,
            f"needs {needed:,} questions for {limit.margin_points:g} points, has {count:,}{shows}",
        )
    return Outcome.PASS, f"{count:,} questions show a loss of {limit.margin_points:g} points"


def _detectable_points(
    first: MetricResult, second: MetricResult, policy: AccuracyPolicy
) -> float | None:
    lost, won = _losses(first, second)
    count = len(second.values)
    share = detectable_loss(
        _discordant(lost, won, count), count, alpha=shared_alpha(policy), power=policy.planned.power
    )
    return 100 * share if share < 1 else None


def judge_kl(
    limit: KlLimit, judged: Judged, alpha: float | None = None, share: float = 1.0
) -> list[LimitOutcome]:
    """Judge each limited statistic of the tokens' KL divergences.

    alpha: see clearly_beyond. share: the part of it that this look may spend, and of the 2.5 % at
    an end of the interval within which a limit is kept (see PowerSchedule).
    """
    metrics = {"mean": KL} | {name: kl_metric(name) for name in KL_QUANTILES}
    return [
        _judge_value(
            judged,
            f"KL {name} of {limit.text}",
            limit.text,
            metric,
            most,
            unit="nats",
            fewest=fewest_tokens(KL_QUANTILES[name]) if KL_QUANTILES.get(name, 1) < 1 else 0,
            alpha=alpha,
            share=share,
        )
        for name, metric in metrics.items()
        if (most := getattr(limit, name)) is not None
    ]


def judge_agreement(
    limit: AgreementLimit, judged: Judged, alpha: float | None = None, share: float = 1.0
) -> list[LimitOutcome]:
    """Judge each limited share of equal predictions. alpha, share: as in judge_kl."""
    return [
        _judge_value(
            judged,
            f"{name} agreement of {limit.text}",
            limit.text,
            metric,
            least,
            alpha=alpha,
            share=share,
        )
        for name, metric in (("top1", TOP1), ("top5", TOP5))
        if (least := getattr(limit, name)) is not None
    ]


def _judge_value(
    judged: Judged,
    check: str,
    text: str,
    metric: str,
    bound: float,
    *,
    unit: str = "share",
    fewest: int = 0,
    alpha: float | None,
    share: float,
) -> LimitOutcome:
    """Judge a value with its interval by its upper, or lower, limit."""
    higher = unit == "share"
    words = f"at least {bound:g}" if higher else f"{bound:g} nats"
    result = judged.find(judged.scheme, text, metric)
    whole = judged.find(judged.scheme, text, PERPLEXITY)
    broken = failure_reason(judged, whole, whole) or ("" if result is None else result.detail)
    if result is None or result.value is None:
        outcome = Outcome.REGRESSION if broken else Outcome.MISSING
        reason = broken or judged.absent.get(text, "no result arrived")
        return LimitOutcome(judged.scheme, check, outcome, reason, words)
    interval = _interval_of(result)
    beyond = result.value < bound if higher else result.value > bound + _ROUNDING
    segments = len(result.values if whole is None else whole.values)
    end = far_end(interval, segments, share, low=higher)
    may_be = end < bound if higher else end > bound + _ROUNDING
    outcome, reason = Outcome.PASS, ""
    spent = None if alpha is None else alpha * share
    if beyond and clearly_beyond(interval, bound, segments, spent):
        outcome, reason = Outcome.REGRESSION, f"is {result.value:.4g}"
    elif beyond:
        outcome = Outcome.AMBIGUOUS
        reason = f"is {result.value:.4g}, past the limit within noise: more tokens are needed"
    elif result.n_items < fewest:
        outcome = Outcome.MISSING
        reason = f"needs {fewest:,} tokens, has {result.n_items:,}: give a longer text"
    elif segments == 1:
        outcome, reason = Outcome.AMBIGUOUS, _ONE_SEGMENT
    elif may_be:
        outcome, reason = Outcome.AMBIGUOUS, f"may be {end:.4g}: more tokens are needed"
    return LimitOutcome(
        judged.scheme,
        check,
        outcome,
        reason,
        words,
        value=result.value,
        low=interval.low,
        high=interval.high,
        unit=unit,
        too_few=outcome is Outcome.MISSING,
    )


def clearly_beyond(interval: Interval, bound: float, count: int, alpha: float | None) -> bool:
    """True if an estimate exceeds a bound by more than chance does with a probability of alpha.

    interval: of 95 %, from `count` segments. It is widened to that probability by Student's
    quantiles, unless it has no width (a maximum, one segment). alpha None: any estimate beyond the
    bound counts.
    """
    end = interval.low if interval.estimate > bound else interval.high
    reach = abs(interval.estimate - end)
    if alpha is None or count < 2 or reach == 0:
        return True
    return abs(interval.estimate - bound) > reach * wider_than_95(count, alpha)


def far_end(interval: Interval, count: int, share: float, *, low: bool) -> float:
    """An end of an interval of 95 %, moved outwards so that a share of its 2.5 % is beyond it."""
    end = interval.low if low else interval.high
    if share >= 1 or count < 2:
        return end
    return interval.estimate + (end - interval.estimate) * wider_than_95(count, 0.025 * share)


def _interval_of(result: MetricResult) -> Interval:
    assert result.value is not None
    if len(result.values) > 1:
        zeros = np.zeros(len(result.values))
        return mean_difference_interval(zeros, result.values, seed=0)
    value = result.value
    return Interval(
        value, float(result.observed.get("low", value)), float(result.observed.get("high", value))
    )


def failure_reason(judged: Judged, first: MetricResult | None, second: MetricResult | None) -> str:
    """Explain a missing result that the scheme itself caused.

    Empty: the scheme has the result, or lacks it for another reason.
    """
    if judged.failure:
        return judged.failure
    if second is not None and second.value is None and (first is second or _has_value(first)):
        return second.detail
    return ""


def _has_value(result: MetricResult | None) -> bool:
    return result is not None and result.value is not None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _in_words(limit: PerplexityLimit, planned: PlannedPower | None) -> str:
    parts = [(limit.at_most, "at most {:g}"), (limit.increase, "+{:g}")]
    if planned is None:
        parts += [(limit.percent, "+{:g} %"), (limit.upper_percent, "interval below +{:g} %")]
    else:
        parts += [(planned.detect, "no loss of {:g} %")]
    return ", ".join(form.format(value) for value, form in parts if value is not None)
