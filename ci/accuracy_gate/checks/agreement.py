"""Agreement of the predictions with the original's: shares of tokens of a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import model_validator

from flexq_bench.accuracy.results import TOP1, TOP5
from flexq_bench.ci.accuracy_gate.contract import Check, CheckContext, LimitOutcome, check_any
from flexq_bench.ci.accuracy_gate.judging import Bound, judge_bound
from flexq_bench.workloads.data_files import DataTable, Share, Text

_METRICS = {"top1": TOP1, "top5": TOP5}


class AgreementLimit(DataTable):
    """The least shares of agreement with the original's predictions; None: not limited."""

    text: Text
    top1: Share | None = None
    top5: Share | None = None

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        check_any(self)
        return self

    @property
    def bounds(self) -> dict[str, float]:
        """Lower limits, by statistic."""
        return {name: least for name in _METRICS if (least := getattr(self, name)) is not None}


class AgreementCheck(Check[AgreementLimit]):
    """Each limited share of equal predictions."""

    key, table = "agreement", AgreementLimit

    def names(self, limit: AgreementLimit) -> tuple[str, ...]:
        return tuple(f"{name} agreement of {limit.text}" for name in limit.bounds)

    def texts(self, limit: AgreementLimit) -> tuple[str, ...]:
        return (limit.text,)

    def tests(self, limit: AgreementLimit) -> int:
        return len(limit.bounds)

    def judge(self, limit: AgreementLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        for name, least in limit.bounds.items():
            check, metric = f"{name} agreement of {limit.text}", _METRICS[name]
            yield judge_bound(context, Bound(check, limit.text, metric, least, unit="share"))
