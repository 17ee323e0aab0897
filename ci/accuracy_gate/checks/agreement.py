"""Agreement of the predictions with the original's: shares of tokens of a text."""

from __future__ import annotations

from flexq_bench.accuracy.results import TOP1, TOP5
from flexq_bench.ci.accuracy_gate.judging import StatisticsCheck, StatisticsLimit
from flexq_bench.workloads.data_files import Share


class AgreementLimit(StatisticsLimit):
    """The least shares of agreement with the original's predictions; None: not limited."""

    top1: Share | None = None
    top5: Share | None = None


class AgreementCheck(StatisticsCheck[AgreementLimit]):
    """Each limited share of equal predictions."""

    key, table = "agreement", AgreementLimit
    metrics, form, unit = {"top1": TOP1, "top5": TOP5}, "{} agreement", "share"
