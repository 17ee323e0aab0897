"""KL divergence of the predictions from the original's, over the tokens of a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import model_validator

from flexq_bench.accuracy.results import KL, KL_QUANTILES, kl_metric
from flexq_bench.ci.accuracy_gate.contract import (
    ALL_TOKENS,
    Check,
    CheckContext,
    LimitOutcome,
    check_any,
)
from flexq_bench.ci.accuracy_gate.judging import Bound, fewest_tokens, judge_bound
from flexq_bench.workloads.data_files import Amount, DataTable, Text

_METRICS = {"mean": KL} | {name: kl_metric(name) for name in KL_QUANTILES}
_MAX = "max"  # of the quantiles: it grows with the number of tokens


class KlLimit(DataTable):
    """The largest KL divergences from the original's predictions, in nats; None: not limited."""

    text: Text
    mean: Amount | None = None
    median: Amount | None = None
    p95: Amount | None = None
    p99: Amount | None = None
    p999: Amount | None = None
    max: Amount | None = None

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        check_any(self)
        return self

    @property
    def bounds(self) -> dict[str, float]:
        """Upper limits in nats, by statistic."""
        return {name: most for name in _METRICS if (most := getattr(self, name)) is not None}


class KlCheck(Check[KlLimit]):
    """Each limited statistic of the tokens' KL divergences."""

    key, table = "kl", KlLimit

    def names(self, limit: KlLimit) -> tuple[str, ...]:
        return tuple(f"KL {name} of {limit.text}" for name in limit.bounds)

    def texts(self, limit: KlLimit) -> tuple[str, ...]:
        return (limit.text,)

    def tests(self, limit: KlLimit) -> int:
        return len(limit.bounds)

    def tokens_needed(self, limit: KlLimit) -> int:
        if _MAX in limit.bounds:
            return ALL_TOKENS
        return max((_fewest(name) for name in limit.bounds), default=0)

    def judge(self, limit: KlLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        for name, most in limit.bounds.items():
            yield judge_bound(
                context,
                Bound(
                    f"KL {name} of {limit.text}",
                    limit.text,
                    _METRICS[name],
                    most,
                    unit="nats",
                    fewest=_fewest(name),
                    whole_text=name == _MAX,
                ),
            )


def _fewest(name: str) -> int:
    """Number of tokens that a statistic needs; the mean and the maximum need none in particular."""
    share = KL_QUANTILES.get(name, 1.0)
    return fewest_tokens(share) if share < 1 else 0
