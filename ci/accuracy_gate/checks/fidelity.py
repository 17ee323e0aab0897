"""Fidelity: the difference from the scheme's own result, in either direction.

A limit of KL divergence that allows for a scheme's own loss also allows for damage of the same
size. Fidelity instead compares with the original, quantized by the gate with the same scheme. A
checkpoint, or kernels, whose results differ from that compute something else.

A checkpoint of another tool is compared with the original rounded to nearest in its formats. That
is a bound: it may be better, and worse by `above_rounding_percent` at most. If a person approved a
checkpoint of the same original and formats, its stored results take the place of both.

The intervals are of 95 % for any alpha of the policy. An undamaged model computes the same, so no
error probability is needed, and wider intervals would let damage pass on few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial

from flexq_bench.accuracy.approved import ApprovedReference
from flexq_bench.accuracy.results import KL, PERPLEXITY, MetricResult
from flexq_bench.ci.accuracy_gate.contract import Check, CheckContext, LimitOutcome, NotJudgedError
from flexq_bench.ci.accuracy_gate.results import SchemeResults, shortened
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.stats import Interval, is_clear, mean_difference_interval
from flexq_bench.workloads.data_files import Amount, Count, DataTable, Text, Texts

_METRICS = {PERPLEXITY: "perplexity", KL: "KL mean"}


class FidelityLimit(DataTable):
    """Largest accepted difference from the original quantized here by the same scheme.

    percent: of the perplexity. kl_percent: of the mean KL divergence. kl: nats; a smaller
    difference of the mean KL divergence passes at any percentage. above_rounding_percent: instead
    of kl_percent, for checkpoints of other tools, see the module's docstring. approvers: who may
    approve a reference; empty: anyone. approval_days: for how long it is valid.
    """

    text: Text
    percent: Amount
    kl_percent: Amount
    kl: Amount = 0.0
    above_rounding_percent: Amount = 25.0
    approvers: Texts = ()
    approval_days: Count = 365


class FidelityCheck(Check[FidelityLimit]):
    """Perplexity and mean KL divergence, each against that of the original quantized here."""

    key, table = "fidelity", FidelityLimit

    def names(self, limit: FidelityLimit) -> tuple[str, ...]:
        return tuple(f"fidelity of {what} of {limit.text}" for what in _METRICS.values())

    def texts(self, limit: FidelityLimit) -> tuple[str, ...]:
        return (limit.text,)

    def judge(self, limit: FidelityLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        results = context.results
        heads = [results.find(context.scheme, limit.text, metric) for metric in _METRICS]
        can_compare = all(head is not None and head.value is not None for head in heads)
        approved = context.approved
        if approved is not None:
            check_approval(approved, limit, datetime.now(UTC))
        own = context.reproduced(limit.text) if can_compare else None
        for name, metric in zip(self.names(limit), _METRICS, strict=True):
            is_bound = approved is None and context.setup.evaluator.is_bounded(context.scheme)
            yield judge_fidelity(limit, name, metric, results, own, is_bound=is_bound)


def check_approval(approved: ApprovedReference, limit: FidelityLimit, now: datetime) -> None:
    """Raise NotJudgedError if the policy does not accept an approval, or no longer."""
    by = approved.approved_by
    if limit.approvers and by not in limit.approvers:
        raise NotJudgedError(
            f"the policy names {', '.join(limit.approvers)} as approvers, not {by}"
        )
    age = now - datetime.fromisoformat(approved.approved_at)
    if age > timedelta(days=limit.approval_days):
        raise NotJudgedError(
            f"{approved}: valid for {limit.approval_days} days: approve a checkpoint again"
        )


def judge_fidelity(
    limit: FidelityLimit,
    name: str,
    metric: str,
    results: SchemeResults,
    own: SchemeResults | None,
    *,
    is_bound: bool = False,
) -> LimitOutcome:
    """Judge a metric by its difference from `own`, the results of the original quantized here.

    is_bound: only a larger value is a fault.
    """
    percent, sign = limit.percent, "+" if is_bound else "±"
    if metric == KL:
        percent = limit.above_rounding_percent if is_bound else limit.kl_percent
    words = f"{sign}{percent:g} %"
    decided = partial(LimitOutcome, results.scheme, name, limit=words, text=limit.text)
    head = results.find(results.scheme, limit.text, metric)
    if broken := results.broken(head, head):
        return decided(GateOutcome.FAIL, broken)
    if head is None or head.value is None:
        raise NotJudgedError(results.lacking(limit.text))
    clean = None if own is None else own.find(results.scheme, limit.text, metric)
    if clean is None or clean.value is None:
        raise NotJudgedError("nothing to compare with")
    shorter = min(len(clean.values), len(head.values))  # an approved reference may have fewer
    clean, head = shortened(clean, shorter), shortened(head, shorter)
    assert head.value is not None  # as before
    value, before = head.value, clean.value or 0.0
    difference, unit = _difference(clean, head), "%"
    if metric == KL and percent / 100 * before <= limit.kl:
        unit, words = "nats", f"{sign}{limit.kl:g} nats"  # the larger of the two counts
    ends = (difference.estimate, difference.low, difference.high)
    if metric == PERPLEXITY:
        beyond = abs(math.expm1(difference.estimate)) > percent / 100
        change, low, high = (100 * math.expm1(end) for end in ends)
    else:
        beyond = abs(difference.estimate) > max(percent / 100 * before, limit.kl)
        scale = 1.0 if unit == "nats" else 100 / before
        change, low, high = (scale * end for end in ends)
    outcome, reason = GateOutcome.PASS, ""
    beyond = beyond and not (is_bound and difference.estimate < 0)
    if beyond and is_clear(difference):
        outcome = GateOutcome.FAIL
        made = "rounding of the original" if is_bound else f"{results.scheme} of the original"
        reason = f"{made} has {before:.5g}, this has {value:.5g}"
    elif beyond:
        outcome = GateOutcome.AMBIGUOUS
        reason = "beyond the limit and within noise: more tokens are needed"
    return decided(
        outcome,
        reason,
        limit=words,
        base=before,
        value=value,
        change=change,
        low=low,
        high=high,
        unit=unit,
    )


def _difference(clean: MetricResult, head: MetricResult) -> Interval:
    if len(clean.values) == len(head.values) > 1:
        return mean_difference_interval(clean.values, head.values, seed=0)
    own, value = clean.value or 0.0, head.value or 0.0
    only = math.log(value / own) if head.metric == PERPLEXITY else value - own
    return Interval(only, only, only)
