"""Weights: each row's distance to the original's, in quantization steps of its format."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from flexq_bench.accuracy.weight_distances import weight_distances
from flexq_bench.ci.accuracy_gate.contract import (
    Check,
    CheckContext,
    LimitOutcome,
    NotJudgedError,
    Stage,
)
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.workloads.data_files import DataTable, Texts

_NAME = "weights"
_MAX_NAMED = 2  # findings in a reason


class WeightsLimit(DataTable):
    """Differences that are accepted. allow: patterns of their names, `weights.lm_head`."""

    allow: Texts = ()


class WeightsCheck(Check[WeightsLimit]):
    """Rows, layers and other tensors that differ by more than their format explains."""

    key, table, stage = "weights", WeightsLimit, Stage.MODEL

    def names(self, limit: WeightsLimit) -> tuple[str, ...]:
        return (_NAME,)

    def judge(self, limit: WeightsLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        model, original = context.model.model, context.original.model
        if model is original:
            return
        context.progress("comparing weights")
        report = weight_distances(model, original)
        odd = [
            difference
            for difference in report.findings
            if not any(fnmatchcase(difference.name, pattern) for pattern in limit.allow)
        ]
        if not odd and report.not_judged:
            name, why = next(iter(report.not_judged.items()))
            raise NotJudgedError(f"{name} ({len(report.not_judged)} in all): {why}")
        reason = "; ".join(map(str, odd[:_MAX_NAMED]))
        if len(odd) > _MAX_NAMED:
            reason += f"; and {len(odd) - _MAX_NAMED} more"
        rows = sum(layer.rows for layer in report.layers)
        yield LimitOutcome(
            context.scheme,
            _NAME,
            GateOutcome.FAIL if odd else GateOutcome.PASS,
            reason,
            "as its format",
            value=max((layer.worst for layer in report.layers), default=0.0),
            unit="steps",
            coverage=f"{rows:,} rows of {len(report.layers)} layers",
            cause=str(odd[0]) if odd else "",
            details=tuple(map(str, odd)),
        )
