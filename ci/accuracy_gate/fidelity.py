"""Fidelity limits: a checkpoint or kernels compared with the scheme's own result on the original.

A limit of KL divergence that allows for a scheme's own loss also allows for damage of the same
size. Fidelity instead compares with the original, quantized by the gate with the same scheme. A
checkpoint, or kernels, whose perplexity or mean KL divergence differs from that compute something
else.
"""

from __future__ import annotations

import math

from flexq_bench.accuracy.results import KL, PERPLEXITY, MetricResult
from flexq_bench.ci.accuracy_gate.limits import Judged, LimitOutcome, failure_reason
from flexq_bench.ci.accuracy_gate.policy import FidelityLimit
from flexq_bench.ci.accuracy_gate.segments import find, shortened
from flexq_bench.ci.gate_perf import Outcome
from flexq_bench.stats import Interval, is_clear, mean_difference_interval

_NO_DIVERGENCE = 1e-9  # nats: too small for a percentage


def judge_fidelity(limit: FidelityLimit, judged: Judged) -> list[LimitOutcome]:
    """Compare perplexity and mean KL divergence with the scheme's own result on the original.

    The intervals are of 95 % for any alpha of the policy. An undamaged model computes the same, so
    no error probability is needed, and wider intervals would let damage pass on few tokens.
    """
    checks = {PERPLEXITY: "perplexity", KL: "KL mean"}
    floor = f", or {limit.kl:g} nats" if limit.kl else ""
    words = {
        PERPLEXITY: f"±{limit.percent:g} %",
        KL: f"±{limit.kl_percent:g} %{floor}",
    }
    own = None if judged.own is None else judged.own.get(limit.text)
    outcomes = []
    for metric, what in checks.items():
        check = f"fidelity of {what} of {limit.text}"
        head = judged.find(judged.scheme, limit.text, metric)
        clean = None if own is None else find(own, judged.scheme, limit.text, metric)
        broken = failure_reason(judged, head, head)
        if broken or head is None or head.value is None:
            outcome = Outcome.REGRESSION if broken else Outcome.MISSING
            reason = broken or judged.absent.get(limit.text, "no result arrived")
            outcomes.append(LimitOutcome(judged.scheme, check, outcome, reason, words[metric]))
        elif clean is None or clean.value is None:
            reason = f"not judged: {judged.unknown or 'nothing to compare with'}"
            outcomes.append(LimitOutcome(judged.scheme, check, Outcome.PASS, reason, words[metric]))
        else:
            outcomes.append(_judge_own(limit, judged.scheme, check, words[metric], clean, head))
    return outcomes


def _judge_own(
    limit: FidelityLimit,
    scheme: str,
    check: str,
    words: str,
    clean: MetricResult,
    head: MetricResult,
) -> LimitOutcome:
    clean = shortened(clean, len(head.values))
    own, value = clean.value or 0.0, head.value or 0.0
    if head.metric == PERPLEXITY:
        difference = Interval(*([math.log(value / own)] * 3))
    else:
        difference = Interval(*([value - own] * 3))
    if len(clean.values) == len(head.values) > 1:
        difference = mean_difference_interval(clean.values, head.values, seed=0)
    ends = (difference.estimate, difference.low, difference.high)
    if head.metric == PERPLEXITY:
        beyond = abs(math.expm1(difference.estimate)) > limit.percent / 100
        change: list[float | None] = [100 * math.expm1(end) for end in ends]
        unit = "%"
    else:
        accepted = max(limit.kl_percent / 100 * own, limit.kl)
        beyond = abs(difference.estimate) > accepted
        relative = own > _NO_DIVERGENCE
        change = [100 * end / own for end in ends] if relative else [*ends]
        unit = "%" if relative else "nats"
    outcome, reason = Outcome.PASS, ""
    if beyond and is_clear(difference):
        outcome = Outcome.REGRESSION
        reason = f"{scheme} of the original has {own:.5g}, this has {value:.5g}"
    elif beyond:
        outcome = Outcome.AMBIGUOUS
        reason = "beyond the limit and within noise: more tokens are needed"
    return LimitOutcome(
        scheme,
        check,
        outcome,
        reason,
        words,
        base=own,
        value=value,
        change=change[0],
        low=change[1],
        high=change[2],
        unit=unit,
    )
