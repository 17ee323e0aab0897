"""Metric of a task: within its margin, by the interval or by a planned test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from flexq_bench.accuracy.results import MetricResult, difference
from flexq_bench.accuracy.tasks import task_name
from flexq_bench.ci.accuracy_gate.contract import (
    AccuracyPolicy,
    Check,
    CheckContext,
    LimitOutcome,
    NotJudgedError,
)
from flexq_bench.ci.accuracy_gate.results import SchemeResults
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.stats import detectable_loss, item_difference, loss_p_value, questions_needed
from flexq_bench.workloads.data_files import Amount, DataTable, Share, Text


class TaskLimit(DataTable):
    """Points by which the metric of a task may be worse."""

    name: Text
    metric: Text
    margin_points: Amount
    at_least: Share | None = None


class TaskCheck(Check[TaskLimit]):
    """The metric of a task of lm-eval, over all of its questions."""

    key, table, repeated, planned = "task", TaskLimit, True, True

    def names(self, limit: TaskLimit) -> tuple[str, ...]:
        return (f"{limit.metric} of {task_name(limit.name)}",)

    def tests(self, limit: TaskLimit) -> int:
        return 1

    def located(self, limit: TaskLimit, folder: Path | None) -> TaskLimit:
        if limit.name.endswith((".yaml", ".yml")) and folder is not None:
            return limit.model_copy(update={"name": str(folder / limit.name)})
        return limit

    def judge(self, limit: TaskLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        policy, results, name = context.policy, context.every_result, task_name(limit.name)
        words = f"-{limit.margin_points:g} points"
        if limit.at_least is not None:
            words += f", at least {limit.at_least:g}"
        first, second = (
            results.find(scheme, name, limit.metric) for scheme in (results.base, results.scheme)
        )
        paired = None if first is None or second is None else difference(first, second)
        if first is None or second is None or paired is None:
            raise NotJudgedError(_no_pair(limit, name, results))
        sign = 1 if first.direction == "higher" else -1
        low, high = sorted((100 * sign * paired.interval.low, 100 * sign * paired.interval.high))
        change = 100 * sign * paired.interval.estimate
        binary = paired.p_value is not None
        detectable = _detectable_points(first, second, policy) if binary else None
        if limit.at_least is not None and paired.value < limit.at_least:
            outcome, reason = GateOutcome.FAIL, f"is {paired.value:.4g}"
        elif policy.planned.detect is not None and binary:
            outcome, reason = _planned(limit, first, second, policy)
        elif change < -limit.margin_points:
            outcome, reason = GateOutcome.FAIL, f"worse by {-change:.3g} points"
        elif low < -limit.margin_points:
            outcome = GateOutcome.AMBIGUOUS
            reason = f"may be worse by {-low:.3g} points{_would_tell(detectable, second.n_items)}"
        else:
            outcome, reason = GateOutcome.PASS, "" if paired.clear else "smaller than its interval"
        decided = partial(LimitOutcome, context.scheme, self.names(limit)[0], limit=words)
        yield decided(
            outcome,
            reason,
            base=paired.base,
            value=paired.value,
            change=change,
            low=low,
            high=high,
            unit="points",
            detectable=detectable,
            coverage=f"{second.n_items:,} questions",
        )


def _no_pair(limit: TaskLimit, name: str, results: SchemeResults) -> str:
    known = sorted({f.metric for f in results.results if f.task == name})
    if known and limit.metric not in known:
        return f"{name} has no {limit.metric}: there are {', '.join(known)}"
    if known:
        return "too few questions to compare"
    return results.absent.get(limit.name, "no result arrived")


def _would_tell(detectable: float | None, count: int) -> str:
    if detectable is None:
        return ": more questions are needed"
    return f": {count:,} questions show a loss of {detectable:.3g} points"


def _losses(first: MetricResult, second: MetricResult) -> tuple[int, int]:
    """Numbers of questions that only the base, and only the scheme, answers correctly."""
    items = item_difference(first.values, second.values)
    pair = items.only_base, items.only_head
    return pair if first.direction == "higher" else (pair[1], pair[0])


def _discordant(lost: int, won: int, count: int) -> float:
    """Share of questions answered differently, with Bonett and Price's adjustment for small
    numbers.
    """
    return (lost + won + 2) / (count + 2)


def _planned(
    limit: TaskLimit, first: MetricResult, second: MetricResult, policy: AccuracyPolicy
) -> tuple[GateOutcome, str]:
    lost, won = _losses(first, second)
    count, alpha, power = len(second.values), policy.planned_alpha, policy.planned.power
    p_value = loss_p_value(lost, won)
    points = max(limit.margin_points, 1e-6)
    discordant = _discordant(lost, won, count)
    needed = questions_needed(discordant, min(points / 100, 0.999), alpha=alpha, power=power)
    if p_value <= alpha:
        return GateOutcome.FAIL, f"{lost} questions lost, {won} won, p {p_value:.2g}"
    if count < needed:
        seen = 100 * detectable_loss(discordant, count, alpha=alpha, power=power)
        shows = f", which show a loss of {seen:.3g} points" if seen < 100 else ""
        return (
            GateOutcome.NOT_JUDGED,
            f"needs {needed:,} questions for {limit.margin_points:g} points, has {count:,}{shows}",
        )
    return GateOutcome.PASS, f"{count:,} questions show a loss of {limit.margin_points:g} points"


def _detectable_points(
    first: MetricResult, second: MetricResult, policy: AccuracyPolicy
) -> float | None:
    lost, won = _losses(first, second)
    count = len(second.values)
    share = detectable_loss(
        _discordant(lost, won, count), count, alpha=policy.planned_alpha, power=policy.planned.power
    )
    return 100 * share if share < 1 else None
