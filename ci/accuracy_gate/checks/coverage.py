"""Coverage of a mixture of experts: tokens of the evaluation that each expert computed."""

from __future__ import annotations

from collections.abc import Iterator

from flexq_bench.ci.accuracy_gate.contract import Check, CheckContext, LimitOutcome
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.workloads.data_files import Count, DataTable

_NAME = "tokens of each expert"


class CoverageLimit(DataTable):
    """expert_tokens: least number of tokens that each expert of each block must have computed."""

    expert_tokens: Count


class CoverageCheck(Check[CoverageLimit]):
    """Tokens of the expert that the routers of the original chose least."""

    key, table = "coverage", CoverageLimit

    def names(self, limit: CoverageLimit) -> tuple[str, ...]:
        return (_NAME,)

    def judge(self, limit: CoverageLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        counts = context.setup.evaluator.expert_tokens
        if not counts:
            return  # a dense model has none
        block, tokens = min(counts.items(), key=lambda item: int(item[1].min()))
        least, expert = int(tokens.min()), int(tokens.argmin())
        outcome, reason = GateOutcome.PASS, ""
        if least < limit.expert_tokens:
            outcome = GateOutcome.NOT_JUDGED
            reason = f"expert {expert} of {block} computed {least}: give more or other texts"
        yield LimitOutcome(
            context.scheme,
            _NAME,
            outcome,
            reason,
            f"at least {limit.expert_tokens:,}",
            value=least,
            unit="tokens",
            coverage=f"{sum(counts[name].size for name in counts):,} experts",
        )
