"""Judgement shared by several checks: a value and its interval against a limit; differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import model_validator

from flexq_bench.accuracy.artefacts.differences import Difference
from flexq_bench.accuracy.results import PERPLEXITY, MetricResult
from flexq_bench.ci.accuracy_gate.contract import (
    ALL_TOKENS,
    Check,
    CheckContext,
    LimitOutcome,
    NotJudgedError,
    check_any,
)
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.stats import Interval, mean_difference_interval, wider_than_95
from flexq_bench.workloads.data_files import DataTable, Text, Texts

Unit = Literal["nats", "share"]
_MAX_NAMED = 3  # differences in a reason
_ROUNDING = 1e-9  # tolerance of a value relative to its limit
NO_INTERVAL = "one segment has no interval: evaluate more tokens"


@dataclass(frozen=True, slots=True)
class Bound:
    """An upper limit of a metric in nats, or a lower limit of a share.

    fewest: tokens that it needs; ALL_TOKENS: its value depends on how many there are.
    """

    check: str
    text: str
    metric: str
    value: float
    unit: Unit
    fewest: int = 0


class StatisticsLimit(DataTable):
    """Limits of statistics over the tokens of a text, one a field; None: not limited."""

    text: Text

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        check_any(self)
        return self

    @property
    def bounds(self) -> dict[str, float]:
        """Limits by statistic."""
        names = (name for name in type(self).model_fields if name != "text")
        return {name: bound for name in names if (bound := getattr(self, name)) is not None}


StatisticsT = TypeVar("StatisticsT", bound=StatisticsLimit)


class StatisticsCheck(Check[StatisticsT]):
    """Each limited statistic. metrics: by statistic. form: of a name, with {} for the statistic."""

    metrics: ClassVar[Mapping[str, str]]
    form: ClassVar[str]
    unit: ClassVar[Unit]

    def names(self, limit: StatisticsT) -> tuple[str, ...]:
        return tuple(self._name(limit, statistic) for statistic in limit.bounds)

    def texts(self, limit: StatisticsT) -> tuple[str, ...]:
        return (limit.text,)

    def tests(self, limit: StatisticsT) -> int:
        return len(limit.bounds)

    def fewest(self, statistic: str) -> int:
        """Return the number of tokens that a statistic needs; ALL_TOKENS: it is of all."""
        return 0

    def tokens_needed(self, limit: StatisticsT) -> int:
        return max(map(self.fewest, limit.bounds))

    def judge(self, limit: StatisticsT, context: CheckContext) -> Iterator[LimitOutcome]:
        for statistic, value in limit.bounds.items():
            name, metric = self._name(limit, statistic), self.metrics[statistic]
            fewest = self.fewest(statistic)
            yield judge_bound(context, Bound(name, limit.text, metric, value, self.unit, fewest))

    def _name(self, limit: StatisticsT, statistic: str) -> str:
        return f"{self.form.format(statistic)} of {limit.text}"


def judge_bound(context: CheckContext, bound: Bound) -> LimitOutcome:
    """Judge a metric of a text by its upper, or lower, limit.

    While a text is evaluated, the look spends a part of the test's alpha, and of the 2.5 % at an
    end of the interval within which a limit is kept (see PowerSchedule). Raises NotJudgedError if
    the text was not evaluated.
    """
    results, higher, limit = context.results, bound.unit == "share", bound.value
    words = f"at least {limit:g}" if higher else f"at most {limit:g} nats"
    decided = partial(LimitOutcome, context.scheme, bound.check, limit=words, text=bound.text)
    result = results.find(context.scheme, bound.text, bound.metric)
    whole = results.find(context.scheme, bound.text, PERPLEXITY)
    if result is None or result.value is None:
        broken = results.broken(whole, whole) or ("" if result is None else result.detail)
        if broken:
            return decided(GateOutcome.FAIL, broken)
        raise NotJudgedError(results.lacking(bound.text))
    interval = _interval_of(result)
    beyond = result.value < limit if higher else result.value > limit + _ROUNDING
    segments = len(result.values if whole is None else whole.values)
    share = context.share(bound.text)
    end = far_end(interval, segments, share, low=higher)
    may_be = end < limit if higher else end > limit + _ROUNDING
    alpha = context.policy.other_alpha
    spent = None if alpha is None else alpha * share
    outcome, reason = GateOutcome.PASS, ""
    if beyond and clearly_beyond(interval, limit, segments, spent):
        outcome = GateOutcome.FAIL
    elif bound.fewest == ALL_TOKENS and _is_part(context, bound.text):
        raise NotJudgedError(f"it is of all tokens, {result.n_items:,} were evaluated")
    elif beyond:
        outcome = GateOutcome.AMBIGUOUS
        reason = "past the limit within noise: more tokens are needed"
    elif result.n_items < bound.fewest != ALL_TOKENS:
        outcome = GateOutcome.NOT_JUDGED
        reason = f"needs {bound.fewest:,} tokens, has {result.n_items:,}: give a longer text"
    elif segments == 1:
        outcome, reason = GateOutcome.AMBIGUOUS, NO_INTERVAL
    elif may_be:
        outcome, reason = GateOutcome.AMBIGUOUS, f"may be {end:.4g}: more tokens are needed"
    return decided(
        outcome,
        reason,
        value=result.value,
        low=interval.low,
        high=interval.high,
        unit=bound.unit,
    )


def _is_part(context: CheckContext, text: str) -> bool:
    """Return True if not all segments of a text were evaluated."""
    result = context.every_result.find(context.scheme, text, PERPLEXITY)
    return result is None or len(result.values) < context.distinct[text][1]


def fewest_tokens(share: float) -> int:
    """Return the number of tokens of which on average one is beyond the quantile of this share."""
    return math.ceil(1 / (1 - share) - 1e-6)


def clearly_beyond(interval: Interval, bound: float, count: int, alpha: float | None) -> bool:
    """Return True if an estimate exceeds a bound by more than chance does in a share of alpha.

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
    assert result.value is not None  # the caller checks
    if len(result.values) > 1:
        zeros = np.zeros(len(result.values))
        return mean_difference_interval(zeros, result.values, seed=0)
    value = result.value
    return Interval(
        value, float(result.observed.get("low", value)), float(result.observed.get("high", value))
    )


class DifferencesLimit(DataTable):
    """Differences that are accepted. allow: patterns of their names, `config.rope_parameters.*`."""

    allow: Texts = ()


def judge_differences(
    context: CheckContext,
    check: str,
    limit: DifferencesLimit,
    found: Sequence[Difference],
    words: str,
    *,
    value: float | None = None,
    unit: str = "differences",
    coverage: str = "",
) -> LimitOutcome:
    """Fail for any difference that the limit does not accept. value: None: their number."""
    odd = [x for x in found if not any(fnmatchcase(x.name, known) for known in limit.allow)]
    reason = "; ".join(map(str, odd[:_MAX_NAMED]))
    if len(odd) > _MAX_NAMED:
        reason += f"; and {len(odd) - _MAX_NAMED} more"
    return LimitOutcome(
        context.scheme,
        check,
        GateOutcome.FAIL if odd else GateOutcome.PASS,
        reason or ", ".join(f"{difference.name} is allowed" for difference in found),
        words,
        value=float(len(odd)) if value is None else value,
        unit=unit,
        coverage=coverage,
        cause=str(odd[0]) if odd else "",
        details=tuple(map(str, odd)),
    )
