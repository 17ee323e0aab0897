"""Upper tail of a text's losses: a loss that a few segments carry, which the mean can hide."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flexq_bench.accuracy.results import PERPLEXITY
from flexq_bench.ci.accuracy_gate.contract import (
    Check,
    CheckContext,
    LimitOutcome,
    NotJudgedError,
)
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.stats import MIN_VALUES, Interval, tail_excess
from flexq_bench.workloads.data_files import Amount, DataTable, Text

_REASONS = {
    GateOutcome.FAIL: "few segments carry a loss",
    GateOutcome.AMBIGUOUS: "beyond the limit within noise: more tokens are needed",
}


class TailLimit(DataTable):
    """percent: by which the worst 5 % of segments may lose more than the best 5 % gain."""

    text: Text
    percent: Amount


class TailCheck(Check[TailLimit]):
    """Mean loss of the worst 5 % of segments plus that of the best, which noise makes negative."""

    key, table = "tail", TailLimit

    def names(self, limit: TailLimit) -> tuple[str, ...]:
        return (f"worst segments of {limit.text}",)

    def texts(self, limit: TailLimit) -> tuple[str, ...]:
        return (limit.text,)

    def tests(self, limit: TailLimit) -> int:
        return 1

    def judge(self, limit: TailLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        first, second = context.results.pair(limit.text, PERPLEXITY)
        if first is None or second is None or not first.values or not second.values:
            raise NotJudgedError(context.results.lacking(limit.text))
        losses = np.subtract(second.values, first.values)
        if losses.size < MIN_VALUES:
            raise NotJudgedError(f"{losses.size} segments are fewer than {MIN_VALUES}")
        places = context.setup.evaluator.places(limit.text)
        kept = [places[i] for i in context.distinct[limit.text][0] if i < len(places)]
        losses = losses[np.argsort(kept[: losses.size])]
        share, alpha = context.share(limit.text), context.policy.other_alpha
        spent = None if alpha is None else alpha * share
        bound = math.log1p(limit.percent / 100)
        found, outcome = judge_tail(losses, bound, spent)
        change, low, high = (
            100 * math.expm1(min(end, 700.0)) for end in (found.estimate, found.low, found.high)
        )
        yield LimitOutcome(
            context.scheme,
            self.names(limit)[0],
            outcome,
            _REASONS.get(outcome, ""),
            f"+{limit.percent:g} %",
            change=change,
            low=low,
            high=high,
            unit="%",
            text=limit.text,
        )


def judge_tail(
    losses: NDArray[np.float64], bound: float, alpha: float | None
) -> tuple[Interval, GateOutcome]:
    """Return the excess of the losses' upper tail, and whether it is beyond the bound, in nats.

    losses: [segments], in the text's order. alpha: probability that an excess of the bound fails;
    None: any beyond it.
    """
    excess = tail_excess(losses)
    outcome = GateOutcome.PASS
    if excess.estimate > bound:
        fails = alpha is None or excess.estimate - bound > excess.reach(alpha)
        outcome = GateOutcome.FAIL if fails else GateOutcome.AMBIGUOUS
    return excess.interval, outcome
