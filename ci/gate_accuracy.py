"""The accuracy gate: evaluate a model under schemes and judge the results by a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ci.accuracy_policy import AccuracyPolicy, ParityLimit, PerplexityLimit, TaskLimit
from ci.gate_perf import Outcome, exit_code_of
from db.engine import Database
from flexq_bench.accuracy import (
    FULL_PRECISION,
    PERPLEXITY,
    AccuracyError,
    CalibrationPlan,
    Difference,
    EvaluationPlan,
    MetricResult,
    MissingTaskError,
    SiteParity,
    check_tasks,
    difference,
    kernel_parity,
    task_name,
)
from flexq_bench.accuracy.records import OnUnit, Unit, execute
from flexq_bench.accuracy.results import REFERENCE, Through
from flexq_bench.accuracy.setup import PreparedModel
from flexq_bench.accuracy.texts import Text
from flexq_bench.errors import MissingResultsError, UsageError
from flexq_bench.exit_codes import ExitCode
from kernels.errors import KernelError


@dataclass(frozen=True, slots=True)
class LimitOutcome:
    """One limit of the policy for one scheme.

    change, low, high: in `unit`; None: nothing was judged, the reason says why. limit: in words.
    """

    scheme: str
    check: str  # for example "perplexity of wikitext", "acc of piqa", "parity of kernels"
    outcome: Outcome
    reason: str
    limit: str
    base: float | None = None
    value: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class AccuracyReport:
    """What a gate found."""

    model: str
    model_hash: str
    base: str
    policy: str
    commit: str
    device: str
    judged: tuple[LimitOutcome, ...]
    through: Through = REFERENCE
    content_hashes: Mapping[str, str] = field(default_factory=dict)  # by scheme, where known

    @property
    def exit_code(self) -> ExitCode:
        """What the worst outcome means."""
        return exit_code_of(one.outcome for one in self.judged)

    def with_outcome(self, outcome: Outcome) -> tuple[LimitOutcome, ...]:
        return tuple(one for one in self.judged if one.outcome is outcome)


def planned_evaluation(
    policy: AccuracyPolicy,
    schemes: Sequence[str],
    base: str,
    texts: Sequence[Text],
    task_data: Path | None,
    *,
    batch: int,
    calibration: CalibrationPlan | None,
    seed: int,
    through: Through | None = None,
    checkpoint: str | None = None,
) -> tuple[EvaluationPlan, dict[str, str]]:
    """The evaluation that a policy needs, and what of it is missing here, with the reason.

    texts: those at hand. task_data: folder with the tasks' data; None: lm-eval downloads it. batch:
    segments, or questions, at a time. through, checkpoint: as EvaluationPlan has them.
    Raises UsageError if `base` is judged against itself or a text has no limit,
    MissingResultsError if nothing can be evaluated.
    """
    if base in schemes:
        raise UsageError(f"{base} can't be judged against itself: give another --base")
    missing = {**_missing_texts(policy, texts), **_missing_tasks(policy, task_data)}
    names = dict.fromkeys(limit.name for limit in policy.tasks)
    tasks = tuple(name for name in names if name not in missing)
    if not texts and not tasks:
        raise MissingResultsError(
            f"nothing of policy {policy.name} can be evaluated: "
            + "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        )
    plan = EvaluationPlan(
        schemes=tuple(dict.fromkeys((base, *schemes))),
        texts=tuple({text.name: text for text in texts}.values()),
        tasks=tasks,
        task_data=task_data,
        context=policy.context,
        max_tokens=policy.max_tokens,
        limit=policy.limit,
        batch=batch,
        calibration=calibration,
        seed=seed,
        through=through,
        checkpoint=checkpoint,
    )
    return plan, missing


def _missing_texts(policy: AccuracyPolicy, texts: Sequence[Text]) -> dict[str, str]:
    wanted = dict.fromkeys(limit.text for limit in policy.perplexities)
    given = dict.fromkeys(text.name for text in texts)
    for name in given:
        if name not in wanted:
            raise UsageError(
                f"policy {policy.name} has no limit on a text called {name}: its texts are "
                f"{', '.join(wanted) or 'none'}; name yours with --data NAME=FILE"
            )
    return {n: f"no text: give --data {n}=FILE" for n in wanted if n not in given}


def _missing_tasks(policy: AccuracyPolicy, data: Path | None) -> dict[str, str]:
    missing: dict[str, str] = {}
    for name in dict.fromkeys(limit.name for limit in policy.tasks):
        try:
            check_tasks([name], data)
        except AccuracyError as error:  # of this machine, or of lm-eval at all
            missing[name] = str(error)
    return missing


def gate_accuracy(
    policy: AccuracyPolicy,
    setup: PreparedModel,
    database: Database,
    schemes: Sequence[str],
    base: str,
    missing: Mapping[str, str],
    *,
    on_unit: OnUnit,
) -> AccuracyReport:
    """Evaluate, store, and hold every limit against what was found.

    schemes, base: by name. missing: texts and tasks of the policy that can't be evaluated here,
    with the reason. Raises what the evaluation and the database raise.
    """
    absent = dict(missing)
    judged: list[LimitOutcome] = []
    results: list[MetricResult] = []
    for scheme in (base, *schemes):
        units = [unit for unit in setup.plan.units if unit[0] == scheme]
        results += _evaluate(database, setup, units, absent, on_unit)
        if scheme == base:
            continue
        judged += [
            _judge_text(limit, scheme, base, results, absent) for limit in policy.perplexities
        ]
        judged += [_judge_task(limit, scheme, base, results, absent) for limit in policy.tasks]
        if policy.parity is not None:  # while the scheme's model is at hand
            judged.append(_judge_parity(policy.parity, scheme, setup))
    origin = setup.origin
    return AccuracyReport(
        model=origin.model,
        model_hash=origin.model_hash,
        base=base,
        policy=policy.name,
        commit=origin.commit.sha,
        device=origin.device.sku,
        through=setup.evaluator.through,
        content_hashes={one.scheme: one.content_hash for one in results if one.content_hash},
        judged=tuple(judged),
    )


def _evaluate(
    database: Database,
    setup: PreparedModel,
    units: Sequence[Unit],
    absent: dict[str, str],
    on_unit: OnUnit,
) -> list[MetricResult]:
    """What can be found; a task that lm-eval can't evaluate is absent, with its reason."""
    results: list[MetricResult] = []
    for unit in units:
        try:
            results += execute(database, setup.evaluator, [unit], setup.origin, on_unit=on_unit)
        except MissingTaskError as error:
            absent[unit[1]] = str(error)
    return results


def _judge_text(
    limit: PerplexityLimit,
    scheme: str,
    base: str,
    results: Sequence[MetricResult],
    absent: dict[str, str],
) -> LimitOutcome:
    check = f"perplexity of {limit.text}"
    words = _in_words(limit)
    first, second = (_find(results, s, limit.text, PERPLEXITY) for s in (base, scheme))
    if first is None or second is None or first.value is None or second.value is None:
        broken = second.detail if second is not None and second.value is None else ""
        if broken and first is not None and first.value is not None:
            return LimitOutcome(scheme, check, Outcome.REGRESSION, broken, words, base=first.value)
        reason = broken or absent.get(limit.text, "no result arrived")
        return LimitOutcome(scheme, check, Outcome.MISSING, reason, words)
    paired = difference(first, second)
    percent = 100 * (second.value / first.value - 1)
    outcome, reason = _text_outcome(limit, first.value, second.value, paired)
    return LimitOutcome(
        scheme,
        check,
        outcome,
        reason,
        words,
        base=first.value,
        value=second.value,
        change=percent,
        low=None if paired is None else 100 * paired.interval.low,
        high=None if paired is None else 100 * paired.interval.high,
        unit="%",
    )


def _text_outcome(
    limit: PerplexityLimit, before: float, after: float, paired: Difference | None
) -> tuple[Outcome, str]:
    increase, percent = after - before, 100 * (after / before - 1)
    if limit.increase is not None and increase > limit.increase:
        return Outcome.REGRESSION, f"grew by {increase:.3g}"
    if limit.percent is not None and percent > limit.percent:
        return Outcome.REGRESSION, f"grew by {percent:.3g} %"
    if limit.upper_percent is None:
        return Outcome.PASS, ""
    if paired is None:
        return Outcome.AMBIGUOUS, "one segment has no interval: evaluate more tokens"
    upper = 100 * paired.interval.high
    if upper > limit.upper_percent:
        return Outcome.REGRESSION, f"grew by up to {upper:.3g} %"
    return Outcome.PASS, "" if paired.clear else "smaller than its interval"


def _judge_task(
    limit: TaskLimit,
    scheme: str,
    base: str,
    results: Sequence[MetricResult],
    absent: dict[str, str],
) -> LimitOutcome:
    name = task_name(limit.name)
    check = f"{limit.metric} of {name}"
    words = f"-{limit.margin_points:g} points"
    first, second = (_find(results, s, name, limit.metric) for s in (base, scheme))
    paired = None if first is None or second is None else difference(first, second)
    if first is None or second is None or paired is None:
        known = sorted({f.metric for f in results if f.task == name})
        reason = absent.get(limit.name, "no result arrived")
        if known and limit.metric not in known:
            reason = f"{name} has no {limit.metric}: there are {', '.join(known)}"
        elif known:
            reason = "too few questions to compare"
        return LimitOutcome(scheme, check, Outcome.MISSING, reason, words)
    sign = 1 if first.direction == "higher" else -1
    low, high = sorted((100 * sign * paired.interval.low, 100 * sign * paired.interval.high))
    change = 100 * sign * paired.interval.estimate
    outcome, reason = Outcome.PASS, "" if paired.clear else "smaller than its interval"
    if change < -limit.margin_points:
        outcome, reason = Outcome.REGRESSION, f"worse by {-change:.3g} points"
    elif low < -limit.margin_points:
        outcome = Outcome.AMBIGUOUS
        reason = f"may be worse by {-low:.3g} points: more questions would tell"
    return LimitOutcome(
        scheme,
        check,
        outcome,
        reason,
        words,
        base=paired.base,
        value=paired.value,
        change=change,
        low=low,
        high=high,
        unit="points",
    )


def _judge_parity(limit: ParityLimit, scheme: str, setup: PreparedModel) -> LimitOutcome:
    check = "parity of kernels"
    words = f"{limit.tolerance:g}"
    evaluator = setup.evaluator
    segment = evaluator.first_segment()
    if segment is None:
        reason = "no text makes inputs for the layers: give --data NAME=FILE"
        return LimitOutcome(scheme, check, Outcome.MISSING, reason, words)
    try:
        sites = kernel_parity(
            evaluator.model_under(FULL_PRECISION).model,
            evaluator.model_under(scheme).model,
            segment,
            limit.kernels,
            backend="cpu" if setup.origin.device.backend == "cpu" else "cuda",
        )
    except KernelError as error:
        return LimitOutcome(scheme, check, Outcome.MISSING, str(error), words)
    return _parity_of(sites, scheme, check, limit.tolerance)


def _parity_of(
    sites: Sequence[SiteParity], scheme: str, check: str, tolerance: float
) -> LimitOutcome:
    words = f"{tolerance:g}"
    broken = [site for site in sites if site.kernel and site.max_rel_error is None]
    wrong = [s for s in sites if s.max_rel_error is not None and s.max_rel_error > tolerance]
    without = [site for site in sites if not site.kernel]
    worst = max((s.max_rel_error for s in sites if s.max_rel_error is not None), default=None)
    outcome, reason = Outcome.PASS, f"{len(sites)} layers"
    if wrong:
        outcome = Outcome.REGRESSION
        reason = f"{wrong[0].kernel} differs at {wrong[0].site} ({len(wrong)} of {len(sites)})"
    elif broken:
        outcome = Outcome.MISSING
        reason = f"{broken[0].kernel} at {broken[0].site}: {broken[0].detail}"
    elif without:  # what was evaluated is nothing that would run
        outcome = Outcome.REGRESSION
        reason = f"{without[0].site} ({len(without)} of {len(sites)}): {without[0].detail}"
    return LimitOutcome(scheme, check, outcome, reason, words, value=worst, unit="relative error")


def _find(
    results: Sequence[MetricResult], scheme: str, task: str, metric: str
) -> MetricResult | None:
    wanted = (scheme, task, metric)
    return next((f for f in results if (f.scheme, f.task, f.metric) == wanted), None)


def _in_words(limit: PerplexityLimit) -> str:
    parts = (
        (limit.increase, "+{:g}"),
        (limit.percent, "+{:g} %"),
        (limit.upper_percent, "interval below +{:g} %"),
    )
    return ", ".join(form.format(value) for value, form in parts if value is not None)
