"""Checks of the accuracy gate: results compared with the limits of a policy, one outcome each.

Each `judge_...` function is a check, and takes its limit from a table of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.parity import SiteParity, kernel_parity
from flexq_bench.accuracy.results import (
    FULL_PRECISION,
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
from flexq_bench.accuracy.setup import PreparedModel
from flexq_bench.accuracy.tasks import task_name as name_of_task
from flexq_bench.ci.accuracy_gate.policy import (
    AccuracyPolicy,
    AgreementLimit,
    FidelityLimit,
    KlLimit,
    ParityLimit,
    PerplexityLimit,
    PlannedPower,
    TaskLimit,
)
from flexq_bench.ci.accuracy_gate.power import TextTest, fewest_tokens, limit_alpha, shared_alpha
from flexq_bench.ci.accuracy_gate.results import SchemeResults, find, shortened
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.kernels.errors import KernelError
from flexq_bench.stats import (
    Decision,
    Interval,
    TestPlan,
    detectable_loss,
    is_clear,
    item_difference,
    loss_p_value,
    mean_difference_interval,
    questions_needed,
    wider_than_95,
)

_ROUNDING = 1e-9  # tolerance of a value relative to its limit
_MIN_DIVERGENCE = 1e-9  # nats: smaller values give no percentage
_NO_INTERVAL = "one segment has no interval: evaluate more tokens"


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
    outcome: GateOutcome
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


def deciding(judged: Iterable[LimitOutcome]) -> list[GateOutcome]:
    """The outcomes that determine the verdict.

    A missing result outweighs all others. If only one limit has too few data, however, a regression
    of another limit decides.
    """
    outcomes = list(judged)
    fails = any(limit.outcome is GateOutcome.REGRESSION for limit in outcomes)
    return [limit.outcome for limit in outcomes if not (fails and limit.too_few)]


def judge_text(
    limit: PerplexityLimit, results: SchemeResults, planned: PlannedPower, test: TextTest | None
) -> LimitOutcome:
    """Judge the perplexity of a text. test: the planned one; None: there is no plan."""
    check = f"perplexity of {limit.text}"
    words = _in_words(limit, planned if test is not None else None)
    decided = partial(LimitOutcome, results.scheme, check, limit=words)
    first, second = results.pair(limit.text, PERPLEXITY)
    broken = results.failure_reason(first, second)
    if broken or first is None or second is None or first.value is None or second.value is None:
        outcome = GateOutcome.REGRESSION if broken else GateOutcome.MISSING
        base = None if first is None else first.value
        reason = broken or results.lacking(limit.text, first, second)
        return decided(outcome, reason, base=base)
    paired = difference(first, second)
    outcome, reason = _text_outcome(limit, first.value, second.value, paired, test, second)
    return decided(
        outcome,
        reason,
        base=first.value,
        value=second.value,
        change=100 * (second.value / first.value - 1),
        low=None if paired is None else 100 * paired.interval.low,
        high=None if paired is None else 100 * paired.interval.high,
        unit="%",
        detectable=_finite(
            _detectable(first, second, planned) if test is None else test.detectable
        ),
        too_few=outcome is GateOutcome.MISSING,
    )


def _text_outcome(
    limit: PerplexityLimit,
    before: float,
    after: float,
    paired: MetricDifference | None,
    test: TextTest | None,
    head: MetricResult,
) -> tuple[GateOutcome, str]:
    increase, percent = after - before, 100 * (after / before - 1)
    if limit.at_most is not None and after > limit.at_most:
        return GateOutcome.REGRESSION, f"is {after:.4g}"
    if limit.increase is not None and increase > limit.increase:
        return GateOutcome.REGRESSION, f"grew by {increase:.3g}"
    if test is not None:  # the policy's `detect` replaces its percentages
        return _planned_outcome(test, head)
    if limit.percent is not None and percent > limit.percent:
        return GateOutcome.REGRESSION, f"grew by {percent:.3g} %"
    if limit.upper_percent is None:
        return GateOutcome.PASS, ""
    if percent > limit.upper_percent:
        return GateOutcome.REGRESSION, f"grew by {percent:.3g} %"
    if paired is None:
        return GateOutcome.AMBIGUOUS, _NO_INTERVAL
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
        return GateOutcome.REGRESSION, f"{than}, clear after {used}"
    rates = f"power {100 * test.plan.test.power:g} %, alpha {100 * test.plan.test.alpha:.2g} %"
    if test.decision is Decision.BELOW:
        return GateOutcome.PASS, f"{used} show a loss of {test.detectable:.3g} % ({rates})"
    reason = f"needs {test.needed * segment:,} tokens, has {test.losses.size * segment:,}"
    if test.repeated:
        reason += f" (in addition to {test.repeated} duplicate segments)"
    if math.isfinite(test.detectable):
        reason += f", which show a loss of {test.detectable:.3g} % ({rates})"
    return GateOutcome.MISSING, f"{reason}: give a longer text"


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


def judge_task(limit: TaskLimit, results: SchemeResults, policy: AccuracyPolicy) -> LimitOutcome:
    """Judge the metric of a task: within its margin, by the interval or by a planned test."""
    name = name_of_task(limit.name)
    check = f"{limit.metric} of {name}"
    words = f"-{limit.margin_points:g} points"
    if limit.at_least is not None:
        words += f", at least {limit.at_least:g}"
    decided = partial(LimitOutcome, results.scheme, check, limit=words)
    first, second = (results.find(s, name, limit.metric) for s in (results.base, results.scheme))
    paired = None if first is None or second is None else difference(first, second)
    if first is None or second is None or paired is None:
        if results.failure:
            return decided(GateOutcome.REGRESSION, results.failure)
        return decided(GateOutcome.MISSING, _no_pair(limit, name, results))
    sign = 1 if first.direction == "higher" else -1
    low, high = sorted((100 * sign * paired.interval.low, 100 * sign * paired.interval.high))
    change = 100 * sign * paired.interval.estimate
    binary = paired.p_value is not None
    detectable = _detectable_points(first, second, policy) if binary else None
    if limit.at_least is not None and paired.value < limit.at_least:
        outcome, reason = GateOutcome.REGRESSION, f"is {paired.value:.4g}"
    elif policy.planned.detect is not None and binary:
        outcome, reason = _planned_task(limit, first, second, policy)
    elif change < -limit.margin_points:
        outcome, reason = GateOutcome.REGRESSION, f"worse by {-change:.3g} points"
    elif low < -limit.margin_points:
        outcome = GateOutcome.AMBIGUOUS
        reason = f"may be worse by {-low:.3g} points{_would_tell(detectable, second.n_items)}"
    else:
        outcome, reason = GateOutcome.PASS, "" if paired.clear else "smaller than its interval"
    return decided(
        outcome,
        reason,
        base=paired.base,
        value=paired.value,
        change=change,
        low=low,
        high=high,
        unit="points",
        detectable=detectable,
        too_few=outcome is GateOutcome.MISSING,
    )


def _no_pair(limit: TaskLimit, name: str, results: SchemeResults) -> str:
    known = sorted({f.metric for f in results.results if f.task == name})
    if known and limit.metric not in known:
        return f"{name} has no {limit.metric}: there are {', '.join(known)}"
    if known:
        return "too few questions to compare"
    return results.absent.get(limit.name, "no result arrived")


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
) -> tuple[GateOutcome, str]:
    lost, won = _losses(first, second)
    count, alpha, power = len(second.values), shared_alpha(policy), policy.planned.power
    p_value = loss_p_value(lost, won)
    points = max(limit.margin_points, 1e-6)
    discordant = _discordant(lost, won, count)
    needed = questions_needed(discordant, min(points / 100, 0.999), alpha=alpha, power=power)
    if p_value <= alpha:
        return GateOutcome.REGRESSION, f"{lost} questions lost, {won} won, p {p_value:.2g}"
    if count < needed:
        seen = 100 * detectable_loss(discordant, count, alpha=alpha, power=power)
        shows = f", which show a loss of {seen:.3g} points" if seen < 100 else ""
        return (
            GateOutcome.MISSING,
            f"needs {needed:,} questions for {limit.margin_points:g} points, has {count:,}{shows}",
        )
    return GateOutcome.PASS, f"{count:,} questions show a loss of {limit.margin_points:g} points"


def _detectable_points(
    first: MetricResult, second: MetricResult, policy: AccuracyPolicy
) -> float | None:
    lost, won = _losses(first, second)
    count = len(second.values)
    share = detectable_loss(
        _discordant(lost, won, count), count, alpha=shared_alpha(policy), power=policy.planned.power
    )
    return 100 * share if share < 1 else None


def judge_distribution_limits(
    policy: AccuracyPolicy,
    results: SchemeResults,
    share_of: Callable[[str], float],
    *,
    text: str | None = None,
) -> list[LimitOutcome]:
    """Judge the limits of divergence, agreement and fidelity. text: only limits on this text.

    share_of: by text, the part of the error probability of the first two that this look spends.
    """
    alpha = limit_alpha(policy)
    kl, agreement, fidelity = policy.kl, policy.agreement, policy.fidelity
    outcomes: list[LimitOutcome] = []
    if kl is not None and text in (None, kl.text):
        outcomes += judge_kl(kl, results, alpha, share_of(kl.text))
    if agreement is not None and text in (None, agreement.text):
        outcomes += judge_agreement(agreement, results, alpha, share_of(agreement.text))
    if fidelity is not None and text in (None, fidelity.text):
        outcomes += judge_fidelity(fidelity, results)
    return outcomes


def judge_kl(
    limit: KlLimit, results: SchemeResults, alpha: float | None = None, share: float = 1.0
) -> list[LimitOutcome]:
    """Judge each limited statistic of the tokens' KL divergences.

    alpha: see clearly_beyond. share: the part of it that this look may spend, and of the 2.5 % at
    an end of the interval within which a limit is kept (see PowerSchedule).
    """
    metrics = {"mean": KL} | {name: kl_metric(name) for name in KL_QUANTILES}
    return [
        _judge_value(
            results,
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
    limit: AgreementLimit, results: SchemeResults, alpha: float | None = None, share: float = 1.0
) -> list[LimitOutcome]:
    """Judge each limited share of equal predictions. alpha, share: as in judge_kl."""
    return [
        _judge_value(
            results,
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
    results: SchemeResults,
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
    decided = partial(LimitOutcome, results.scheme, check, limit=words)
    result = results.find(results.scheme, text, metric)
    whole = results.find(results.scheme, text, PERPLEXITY)
    broken = results.failure_reason(whole, whole) or ("" if result is None else result.detail)
    if result is None or result.value is None:
        outcome = GateOutcome.REGRESSION if broken else GateOutcome.MISSING
        return decided(outcome, broken or results.absent.get(text, "no result arrived"))
    interval = _interval_of(result)
    beyond = result.value < bound if higher else result.value > bound + _ROUNDING
    segments = len(result.values if whole is None else whole.values)
    end = far_end(interval, segments, share, low=higher)
    may_be = end < bound if higher else end > bound + _ROUNDING
    outcome, reason = GateOutcome.PASS, ""
    spent = None if alpha is None else alpha * share
    if beyond and clearly_beyond(interval, bound, segments, spent):
        outcome, reason = GateOutcome.REGRESSION, f"is {result.value:.4g}"
    elif beyond:
        outcome = GateOutcome.AMBIGUOUS
        reason = f"is {result.value:.4g}, past the limit within noise: more tokens are needed"
    elif result.n_items < fewest:
        outcome = GateOutcome.MISSING
        reason = f"needs {fewest:,} tokens, has {result.n_items:,}: give a longer text"
    elif segments == 1:
        outcome, reason = GateOutcome.AMBIGUOUS, _NO_INTERVAL
    elif may_be:
        outcome, reason = GateOutcome.AMBIGUOUS, f"may be {end:.4g}: more tokens are needed"
    return decided(
        outcome,
        reason,
        value=result.value,
        low=interval.low,
        high=interval.high,
        unit=unit,
        too_few=outcome is GateOutcome.MISSING,
    )


def judge_fidelity(limit: FidelityLimit, results: SchemeResults) -> list[LimitOutcome]:
    """Compare perplexity and mean KL divergence with the scheme's own result on the original.

    A limit of KL divergence that allows for a scheme's own loss also allows for damage of the same
    size. Fidelity instead compares with the original, quantized by the gate with the same scheme. A
    checkpoint, or kernels, whose results differ from that compute something else.

    The intervals are of 95 % for any alpha of the policy. An undamaged model computes the same, so
    no error probability is needed, and wider intervals would let damage pass on few tokens.
    """
    own = None if results.own is None else results.own.get(limit.text)
    floor = f", or {limit.kl:g} nats" if limit.kl else ""
    outcomes = []
    for metric, what, words in (
        (PERPLEXITY, "perplexity", f"±{limit.percent:g} %"),
        (KL, "KL mean", f"±{limit.kl_percent:g} %{floor}"),
    ):
        check = f"fidelity of {what} of {limit.text}"
        decided = partial(LimitOutcome, results.scheme, check, limit=words)
        head = results.find(results.scheme, limit.text, metric)
        clean = None if own is None else find(own, results.scheme, limit.text, metric)
        broken = results.failure_reason(head, head)
        if broken or head is None or head.value is None:
            outcome = GateOutcome.REGRESSION if broken else GateOutcome.MISSING
            reason = broken or results.absent.get(limit.text, "no result arrived")
            outcomes.append(decided(outcome, reason))
        elif clean is None or clean.value is None:
            reason = f"not judged: {results.unknown or 'nothing to compare with'}"
            outcomes.append(decided(GateOutcome.PASS, reason))
        else:
            outcomes.append(_judge_difference(limit, clean, head, decided, results.scheme))
    return outcomes


def _judge_difference(
    limit: FidelityLimit,
    clean: MetricResult,
    head: MetricResult,
    decided: Callable[..., LimitOutcome],
    scheme: str,
) -> LimitOutcome:
    """Judge the difference of a metric from that of the original quantized here, `clean`."""
    clean = shortened(clean, len(head.values))
    own, value = clean.value or 0.0, head.value or 0.0
    is_perplexity = head.metric == PERPLEXITY
    difference = Interval(*([math.log(value / own) if is_perplexity else value - own] * 3))
    if len(clean.values) == len(head.values) > 1:
        difference = mean_difference_interval(clean.values, head.values, seed=0)
    ends = (difference.estimate, difference.low, difference.high)
    unit = "%"
    if is_perplexity:
        beyond = abs(math.expm1(difference.estimate)) > limit.percent / 100
        change, low, high = (100 * math.expm1(end) for end in ends)
    else:
        beyond = abs(difference.estimate) > max(limit.kl_percent / 100 * own, limit.kl)
        if own > _MIN_DIVERGENCE:
            change, low, high = (100 * end / own for end in ends)
        else:
            (change, low, high), unit = ends, "nats"
    outcome, reason = GateOutcome.PASS, ""
    if beyond and is_clear(difference):
        outcome = GateOutcome.REGRESSION
        reason = f"{scheme} of the original has {own:.5g}, this has {value:.5g}"
    elif beyond:
        outcome = GateOutcome.AMBIGUOUS
        reason = "beyond the limit and within noise: more tokens are needed"
    return decided(
        outcome, reason, base=own, value=value, change=change, low=low, high=high, unit=unit
    )


def judge_parity(limit: ParityLimit, scheme: str, setup: PreparedModel) -> LimitOutcome:
    """Compare each quantized layer with the kernel for its formats."""
    check = "parity of kernels"
    decided = partial(LimitOutcome, scheme, check, limit=f"{limit.tolerance:g}")
    evaluator = setup.evaluator
    if not setup.plan.texts:
        reason = "no text makes inputs for the layers: give --data NAME=FILE"
        return decided(GateOutcome.MISSING, reason)
    try:
        sites = kernel_parity(
            _original(setup).model,
            evaluator.model_under(scheme).model,
            evaluator.text_ids(setup.plan.texts[0].name)[0],
            limit.kernels,
            backend="cpu" if setup.origin.device.backend == "cpu" else "cuda",
        )
    except KernelError as error:
        return decided(GateOutcome.MISSING, str(error))
    errors = [site.max_rel_error for site in sites if site.max_rel_error is not None]
    outcome, reason = _parity_outcome(sites, limit.tolerance)
    return decided(outcome, reason, value=max(errors, default=None), unit="relative error")


def _parity_outcome(sites: Sequence[SiteParity], tolerance: float) -> tuple[GateOutcome, str]:
    broken = [site for site in sites if site.kernel and site.max_rel_error is None]
    wrong = [s for s in sites if s.max_rel_error is not None and s.max_rel_error > tolerance]
    without = [site for site in sites if not site.kernel]
    if wrong:
        reason = f"{wrong[0].kernel} differs at {wrong[0].site} ({len(wrong)} of {len(sites)})"
        return GateOutcome.REGRESSION, reason
    if broken:
        return GateOutcome.MISSING, f"{broken[0].kernel} at {broken[0].site}: {broken[0].detail}"
    if without:  # the evaluated model could not run with these kernels
        reason = f"{without[0].site} ({len(without)} of {len(sites)}): {without[0].detail}"
        return GateOutcome.REGRESSION, reason
    return GateOutcome.PASS, f"{len(sites)} layers"


def _original(setup: PreparedModel) -> LoadedModel:
    reference = setup.evaluator.reference
    if reference is not None and reference.model is not None:
        return reference.model
    return setup.evaluator.model_under(FULL_PRECISION)


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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _in_words(limit: PerplexityLimit, planned: PlannedPower | None) -> str:
    parts = [(limit.at_most, "at most {:g}"), (limit.increase, "+{:g}")]
    if planned is None:
        parts += [(limit.percent, "+{:g} %"), (limit.upper_percent, "interval below +{:g} %")]
    else:
        parts += [(planned.detect, "no loss of {:g} %")]
    return ", ".join(form.format(value) for value, form in parts if value is not None)
