"""Weights: each row's distance to the original's, in quantization steps of its format."""

from __future__ import annotations

from collections.abc import Iterator

from flexq_bench.accuracy.weight_distances import weight_distances
from flexq_bench.ci.accuracy_gate.contract import (
    Check,
    CheckContext,
    LimitOutcome,
    NotJudgedError,
    Stage,
)
from flexq_bench.ci.accuracy_gate.judging import DifferencesLimit, judge_differences
from flexq_bench.ci.report_data import GateOutcome

_NAME = "weights"


class WeightsCheck(Check[DifferencesLimit]):
    """Rows, layers and other tensors that differ by more than their format explains."""

    key, table, stage = "weights", DifferencesLimit, Stage.MODEL

    def names(self, limit: DifferencesLimit) -> tuple[str, ...]:
        return (_NAME,)

    def judge(self, limit: DifferencesLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        model, original = context.model.model, context.original.model
        if model is original:
            return
        context.progress("comparing weights")
        report = weight_distances(model, original, context.model.formats)
        rows = sum(layer.rows for layer in report.layers)
        outcome = judge_differences(
            *(context, _NAME, limit, report.findings, "as its format"),
            value=max((layer.worst for layer in report.layers), default=0.0),
            unit="steps",
            coverage=f"{rows:,} rows of {len(report.layers)} layers",
        )
        if outcome.outcome is GateOutcome.PASS and report.not_judged:
            name, why = next(iter(report.not_judged.items()))
            raise NotJudgedError(f"{name} ({len(report.not_judged)} in all): {why}")
        yield outcome
