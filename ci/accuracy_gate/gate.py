"""The accuracy gate: evaluate a model quantized by schemes and judge the results by a policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexq_bench.accuracy.approved import (
    ApprovedReference,
    ApprovedText,
    approved_formats,
    layer_formats,
)
from flexq_bench.accuracy.coverage import TextCoverage
from flexq_bench.accuracy.diagnosis import (
    Diagnosis,
    TokenLoss,
    differences_outside_layers,
    is_foldable,
    losses_of_layers,
    worst_tokens,
)
from flexq_bench.accuracy.errors import AccuracyError, MissingTaskError
from flexq_bench.accuracy.evaluator import Evaluator
from flexq_bench.accuracy.local_tasks import LOCAL_TASKS, where_data_lies
from flexq_bench.accuracy.plan import CalibrationPlan, EvaluationPlan
from flexq_bench.accuracy.records import OnUnit, ResultOrigin, recording
from flexq_bench.accuracy.results import (
    FULL_PRECISION,
    KL,
    ORIGINAL,
    PERPLEXITY,
    REFERENCE,
    MetricResult,
    Through,
)
from flexq_bench.accuracy.setup import PreparedModel
from flexq_bench.accuracy.strata import sampled_texts
from flexq_bench.accuracy.tasks import check_tasks
from flexq_bench.accuracy.texts import Text
from flexq_bench.ci.accuracy_gate.checks.task import TaskLimit
from flexq_bench.ci.accuracy_gate.contract import (
    AccuracyPolicy,
    CheckContext,
    CheckLimit,
    LimitOutcome,
    ModelFolders,
    NotJudgedError,
    PolicyIdentity,
    Stage,
)
from flexq_bench.ci.accuracy_gate.power import PowerSchedule
from flexq_bench.ci.accuracy_gate.results import SchemeResults, find
from flexq_bench.ci.accuracy_gate.text_test import TextTest
from flexq_bench.ci.report_data import GateOutcome, exit_code_of
from flexq_bench.db.engine import Database
from flexq_bench.db.identity import name_uuid
from flexq_bench.db.records import GateLimit, GateRecord
from flexq_bench.errors import FlexqError, MissingResultsError, UsageError, one_line
from flexq_bench.exit_codes import ExitCode
from flexq_bench.schemes.errors import NoKernelError

log = logging.getLogger(__name__)
NO_FOLDERS = ModelFolders()
OnActivity = Callable[[str], None]
# Errors of a model that is wrong in a way that no check of its files finds.
_FAILURES = (UsageError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
QUICK_SEGMENTS = 10  # of each text, for a first opinion
MODEL = "model"  # name of the outcome of a model that can't be evaluated


def _no_activity(what: str) -> None:
    """Show nothing."""


def _described(error: Exception) -> str:
    """Return the message of an error; of a library's, with its class."""
    own = isinstance(error, UsageError | ValueError)
    return one_line(error) if own else f"{type(error).__name__}: {one_line(error)}"


class _FirstSegments:
    """The schedule of a first opinion; see Schedule."""

    def next_count(self, *_: object) -> int:
        return QUICK_SEGMENTS


@dataclass(frozen=True, slots=True)
class AccuracyReport:
    """Result of an accuracy gate."""

    model: str
    model_hash: str
    base: str
    policy: str
    commit: str
    device: str
    judged: tuple[LimitOutcome, ...]
    through: Through = REFERENCE
    content_hashes: Mapping[str, str] = field(default_factory=dict)  # by scheme, where known
    reference: str = ""  # name of the model to compare with; empty: the evaluated model
    reference_hash: str | None = None  # of its files; None: there is none
    warnings: tuple[str, ...] = ()  # about the evaluation
    diagnoses: tuple[Diagnosis, ...] = ()  # of failing schemes
    absent: tuple[str, ...] = ()  # texts and tasks of the policy without data, and what gives them
    quick: bool = False  # a first opinion on a small sample, in which nothing passes
    coverage: tuple[TextCoverage, ...] = ()  # of the texts, by the scheme that was judged on least
    approved: str = ""  # the reference for fidelity of a checkpoint; empty: computed here
    results: tuple[MetricResult, ...] = ()  # that were judged
    head: str = ""  # the engine that was judged, against the engine `base`; empty: a model

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the worst outcome, see `verdict_of`."""
        return exit_code_of((verdict_of(self.judged),))

    def with_outcome(self, outcome: GateOutcome) -> tuple[LimitOutcome, ...]:
        return tuple(limit for limit in self.judged if limit.outcome is outcome)


def verdict_of(judged: Sequence[LimitOutcome]) -> GateOutcome:
    """Return the worst outcome of limits, without those that need not be judged.

    If nothing was judged, the verdict is that.
    """
    counted = {limit.outcome for limit in judged if not limit.allowed}
    return next((outcome for outcome in GateOutcome if outcome in counted), GateOutcome.NOT_JUDGED)


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
    original: bool = True,
    reference: str | None = None,
) -> tuple[EvaluationPlan, dict[str, str]]:
    """Return the plan of the evaluation, and the reason for each text or task that is missing.

    texts: given by the user; shipped strata of the policy are added. task_data: folder with the
    tasks' data; None: lm-eval downloads it. batch: questions per batch. through, checkpoint,
    original, reference: as in EvaluationPlan.
    Raises UsageError if `base` is judged against itself or a text has no limit,
    MissingResultsError if nothing can be evaluated.
    """
    if base in schemes:
        raise UsageError(f"{base} can't be judged against itself: give another --base")
    texts = sampled_texts(policy.texts, texts, seed=seed)
    missing = {**_missing_texts(policy, texts), **_missing_tasks(policy, task_data)}
    names = dict.fromkeys(limit.name for limit in policy.of(TaskLimit))
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
        chat_template=policy.chat_template,
        few_shot=policy.few_shot,
        batch=batch,
        calibration=calibration,
        seed=seed,
        through=through,
        checkpoint=checkpoint,
        original=original,
        reference=reference,
        bos=policy.bos,
    )
    return plan, missing


def _missing_texts(policy: AccuracyPolicy, texts: Sequence[Text]) -> dict[str, str]:
    required = policy.texts
    available = dict.fromkeys(text.name for text in texts)
    for name in available:
        if name not in required:
            raise UsageError(
                f"policy {policy.name} has no limit on a text called {name}: its texts are "
                f"{', '.join(required) or 'none'}; name yours with --data "
                f"{next(iter(required), 'NAME')}=FILE"
            )
    return {n: f"no text: give --data {n}=FILE" for n in required if n not in available}


def _give(text: str) -> str:
    return f"--data {text}=FILE"


def _missing_tasks(policy: AccuracyPolicy, data: Path | None) -> dict[str, str]:
    missing: dict[str, str] = {}
    for name in dict.fromkeys(limit.name for limit in policy.of(TaskLimit)):
        try:
            check_tasks([name], data)
        except AccuracyError as error:  # not available on this machine, or not in lm-eval
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
    diagnose: bool = True,
    folders: ModelFolders = NO_FOLDERS,
    quick: bool = False,
    on_activity: OnActivity = _no_activity,
    approved: ApprovedReference | None = None,
) -> AccuracyReport:
    """Evaluate the schemes, store the results, and judge every limit.

    schemes, base: by name. missing: texts and tasks of the policy that can't be evaluated here,
    with the reason. diagnose: also diagnose failing schemes. quick: evaluate the first segments
    only; what does not fail on them is not judged. on_activity: called with what is done next,
    besides evaluations. approved: the reference for fidelity of the plan's checkpoint. A scheme
    that can't be evaluated fails, and the others are still judged. Raises errors of the database.
    """
    gate = _Gate(
        policy, setup, database, schemes, base, dict(missing), on_unit, folders, quick, on_activity,
        approved,
    )  # fmt: skip
    judged = [_first_opinion(limit) for limit in gate.judge()] if quick else gate.judge()
    failing = [s for s in schemes if _fails(judged, s) and s not in gate.failures]
    origin, reference = setup.origin, setup.plan.reference and setup.evaluator.reference
    return AccuracyReport(
        model=origin.model,
        model_hash=origin.model_hash,
        base=base,
        policy=policy.name,
        commit=origin.commit.sha,
        device=origin.device.sku,
        through=setup.evaluator.through,
        content_hashes={
            result.scheme: result.content_hash for result in gate.results if result.content_hash
        },
        judged=tuple(judged),
        reference=reference.name if reference else "",
        reference_hash=reference.content_hash if reference else None,
        warnings=(*setup.warnings, *gate.short_texts),
        diagnoses=gate.diagnoses(failing) if diagnose and not quick else (),
        absent=gate.absent(),
        quick=quick,
        coverage=tuple(gate.coverage()),
        approved=str(approved or ""),
        results=tuple(gate.results),
    )


def _first_opinion(limit: LimitOutcome) -> LimitOutcome:
    """Return the outcome on a small sample, where only a failure counts."""
    if limit.outcome not in (GateOutcome.PASS, GateOutcome.AMBIGUOUS):
        return replace(limit, allowed=False)
    reason = "within its limit so far" if limit.outcome is GateOutcome.PASS else "undecided so far"
    return replace(limit, outcome=GateOutcome.NOT_JUDGED, reason=f"{reason} (--quick)")


def judge_unloaded(
    policy: AccuracyPolicy,
    origin: ResultOrigin,
    schemes: Sequence[str],
    base: str,
    folders: ModelFolders,
    reason: str,
    *,
    is_judged: bool,
    reference: str | None,
    through: Through,
) -> AccuracyReport:
    """Judge a model that can't be loaded, or whose reference can't be, for the given reason.

    is_judged: it is the judged model that can't be loaded, so the gate fails; else it is not
    judged. Checks of folders are judged.
    """
    judged: list[LimitOutcome] = []
    for scheme in schemes:
        results = SchemeResults(scheme, base, (), {})
        context = CheckContext(policy, scheme, base, folders, None, results, seed=origin.seed)
        early = {
            limit: context.outcomes(limit)
            for limit in policy.limits
            if limit.check.stage is Stage.FOLDERS
        }
        judged += context.after_failure(_model_outcome(scheme, reason, fails=is_judged), early)
    return AccuracyReport(
        model=origin.model,
        model_hash=origin.model_hash,
        base=base,
        policy=policy.name,
        commit=origin.commit.sha,
        device=origin.device.sku,
        judged=tuple(judged),
        through=through,
        reference=reference or "",
    )


def _model_outcome(scheme: str, reason: str, *, fails: bool) -> LimitOutcome:
    outcome = GateOutcome.FAIL if fails else GateOutcome.NOT_JUDGED
    return LimitOutcome(scheme, MODEL, outcome, reason, "can be evaluated")


def _fails(judged: Sequence[LimitOutcome], scheme: str) -> bool:
    return any(limit.scheme == scheme and limit.outcome is GateOutcome.FAIL for limit in judged)


class _Gate:
    """Evaluation state of one gate run."""

    def __init__(
        self,
        policy: AccuracyPolicy,
        setup: PreparedModel,
        database: Database,
        schemes: Sequence[str],
        base: str,
        missing: dict[str, str],
        on_unit: OnUnit,
        folders: ModelFolders,
        quick: bool,
        on_activity: OnActivity,
        approved: ApprovedReference | None,
    ) -> None:
        self._policy, self._setup, self._database = policy, setup, database
        self._schemes, self._base = schemes, base
        self._missing = missing | setup.evaluator.unavailable
        self._on_unit, self._folders, self._quick = on_unit, folders, quick
        self._on_activity, self._approved = on_activity, approved
        self.results: list[MetricResult] = []
        self.failures: dict[str, LimitOutcome] = {}  # of schemes that could not be evaluated
        self._early: dict[str, dict[CheckLimit, list[LimitOutcome]]] = {s: {} for s in schemes}
        self._own: dict[tuple[str, str, int], list[MetricResult]] = {}
        evaluator = setup.evaluator
        self._distinct_segments = cache(evaluator.distinct_segments)
        compared = ORIGINAL if setup.plan.reference is not None else FULL_PRECISION
        self._schedule = (
            PowerSchedule(
                policy,
                self._distinct_segments,
                evaluator.places,
                evaluator.context_of,
                evaluator.enough,
                self._is_undecided,
            )
            if policy.text_plans()
            else None
        )
        # Early stopping compares segment by segment with the reference, so that must be the base.
        self._stops_early = self._schedule is not None and base == compared

    def judge(self) -> list[LimitOutcome]:
        """Evaluate all schemes; return the outcome of every limit of every scheme, in order."""
        for scheme in self._schemes:
            self._judge_early(Stage.FOLDERS, scheme)
        if self._quick:
            self._setup.evaluator.schedule = _FirstSegments()
        for warning in self.short_texts:
            log.warning("%s", warning)
        if self._stops_early:
            if not self._quick:
                self._setup.evaluator.schedule = self._schedule
            for scheme in self._schemes:
                self._evaluate_or_fail(scheme)
            self._evaluate_base()
        else:
            self._evaluate_base()
            for scheme in self._schemes:
                self._evaluate_or_fail(scheme)
        return [limit for scheme in self._schemes for limit in self._judged(scheme)]

    def absent(self) -> tuple[str, ...]:
        """Return the texts and tasks of the policy that have no data, and the option for each."""
        texts = [name for name in self._policy.texts if name in self._missing]
        tasks = [name for name in self._missing if name not in texts]
        missing_data = [
            f"the text {name} ({self._setup.evaluator.unavailable.get(name, _give(name))})"
            for name in texts
        ]
        for name in tasks:
            if name in LOCAL_TASKS and find_spec("lm_eval") is not None:
                missing_data.append(
                    f"the task {name} (--task-data DIR with {where_data_lies(name)})"
                )
            else:
                missing_data.append(f"the task {name} ({self._missing[name]})")
        return tuple(missing_data)

    def coverage(self) -> Iterator[TextCoverage]:
        """Yield the coverage of each text that was evaluated."""
        for text in self._policy.texts:
            found = (find(self.results, scheme, text, PERPLEXITY) for scheme in self._schemes)
            least = min((len(result.values) for result in found if result is not None), default=0)
            if least:
                yield self._setup.evaluator.coverage(text, least)

    @cached_property
    def short_texts(self) -> tuple[str, ...]:
        """Warnings about texts that may be too short for their tests, before they are evaluated."""
        if self._schedule is None or not self._stops_early or self._quick:
            return ()
        return tuple(self._schedule.short_texts(self._distinct))

    def _judge_early(self, stage: Stage, scheme: str) -> None:
        """Judge the limits of a stage before that of the results."""
        context = self._context(scheme, self.results)
        for limit in self._policy.limits:
            if limit.check.stage is stage:
                self._on_activity(f"checking {scheme}: {', '.join(limit.names)}")
                self._early[scheme][limit] = context.outcomes(limit)

    def _evaluate_or_fail(self, scheme: str) -> None:
        if scheme in self.failures:
            return
        try:
            self._evaluate(scheme)
        except NoKernelError as error:  # the model may be right
            self.failures[scheme] = _model_outcome(scheme, str(error), fails=False)
        except _FAILURES as error:  # other schemes may still succeed
            self.failures[scheme] = _model_outcome(scheme, _described(error), fails=True)
        else:
            self._judge_early(Stage.MODEL, scheme)  # while the scheme's model is in memory

    def _is_stored(self, scheme: str) -> bool:
        """Return True for the scheme of the plan's checkpoint."""
        return self._setup.plan.checkpoint is not None and scheme == self._setup.plan.schemes[-1]

    def _evaluate_base(self) -> None:
        """Evaluate the base; if it fails, so do the schemes of the same model.

        With a separate reference each scheme fails with its own reason, such as other tokens.
        """
        plan = self._setup.plan
        try:
            self._evaluate(self._base)
        except _FAILURES as error:
            if plan.reference is not None:
                return
            for scheme in self._schemes:
                fails = not self._is_stored(scheme)
                failure = _model_outcome(scheme, _described(error), fails=fails)
                self.failures.setdefault(scheme, failure)

    def diagnoses(self, schemes: Sequence[str]) -> tuple[Diagnosis, ...]:
        """Locate the losses of failing schemes."""
        found = []
        for scheme in schemes:
            self._on_activity(f"locating the loss of {scheme}")
            found.append(diagnose_scheme(self._setup, scheme))
        return tuple(found)

    def _evaluate(self, scheme: str) -> None:
        """Evaluate a scheme; a task that lm-eval can't evaluate is recorded as missing."""
        setup = self._setup
        units = [unit for unit in setup.plan.units if unit[0] == scheme]
        with recording(self._database, setup.origin) as run:
            for unit in units:
                if unit[1] in self._missing:
                    continue
                try:
                    self.results += run.evaluated(setup.evaluator, unit, self._on_unit)
                except MissingTaskError as error:
                    self._missing[unit[1]] = str(error)

    def _judged(self, scheme: str) -> Iterator[LimitOutcome]:
        """Return the outcomes of all limits; of a failed scheme, which are not judged."""
        context, early = self._context(scheme, self.results), self._early[scheme]
        failure = self.failures.get(scheme)
        if failure is not None:
            yield from context.after_failure(failure, early)
            return
        for limit in self._policy.limits:
            yield from early[limit] if limit in early else context.outcomes(limit)

    def _context(
        self,
        scheme: str,
        results: Sequence[MetricResult],
        share: Callable[[str], float] | None = None,
    ) -> CheckContext:
        """Return what checks may read of a scheme. share: see CheckContext; None: the last look."""
        every = SchemeResults(scheme, self._base, results, self._missing)
        return CheckContext(
            self._policy,
            scheme,
            self._base,
            self._folders,
            self._setup,
            every,
            distinct=self._distinct,
            tests=self._tests(every),
            share=share or partial(self._share, scheme),
            reproduce=partial(self._reproduced, scheme, results),
            approved=self._approved if self._is_stored(scheme) else None,
            progress=self._on_activity,
            quick=self._quick,
            seed=self._setup.plan.seed,
        )

    @cached_property
    def _distinct(self) -> dict[str, tuple[Sequence[int], int]]:
        """The distinct segments of each text of the policy that was given."""
        given = [text for text in self._policy.texts if text not in self._missing]
        return {text: self._distinct_segments(text) for text in given}

    def _share(self, scheme: str, text: str) -> float:
        result = find(self.results, scheme, text, PERPLEXITY)
        if self._schedule is None or not self._stops_early or result is None:
            return 1.0
        return self._schedule.share(scheme, text, len(result.values))

    def _is_undecided(
        self, scheme: str, text: str, results: Sequence[MetricResult], share: float
    ) -> bool:
        """Return True if a limit besides the planned tests is still ambiguous (see Undecided).

        Once one of the text's limits fails, more of the text changes no verdict.
        """
        context = self._context(scheme, results, lambda _: share)
        outcomes = {
            outcome.outcome
            for limit in self._policy.limits
            if limit.check.stage is Stage.RESULTS and not limit.check.planned
            if text in limit.texts
            for outcome in context.outcomes(limit)
        }
        return GateOutcome.AMBIGUOUS in outcomes and GateOutcome.FAIL not in outcomes

    def _tests(self, results: SchemeResults) -> dict[str, TextTest]:
        """Return the planned tests, with all segments if one did not run during the evaluation."""
        tests = {}
        for text in self._distinct:
            if self._schedule is None:
                break
            test = self._schedule.test(results.scheme, text)
            if test is None:
                continue
            tests[text] = test
            first, second = results.pair(text, PERPLEXITY)
            if first is None or second is None:
                continue
            if test.evaluated < len(second.values) == len(first.values):
                test.add(first.values, second.values)
        return tests

    def _reproduced(
        self, scheme: str, results: Sequence[MetricResult], text: str
    ) -> Sequence[MetricResult]:
        """Return results of the original quantized here by the scheme, on the same segments.

        Or those of the approved reference, on as many as it has. Raises NotJudgedError or
        UsageError if there are none.
        """
        result = find(results, scheme, text, PERPLEXITY)
        if result is None or not result.values:
            raise NotJudgedError(self._missing.get(text, "no result arrived"))
        plan, evaluator = self._setup.plan, self._setup.evaluator
        stored = self._is_stored(scheme)
        if stored and self._approved is not None:
            model, original = evaluator.model_under(scheme).model, evaluator.reference
            of_original = "" if original is None else original.content_hash
            if why := self._approved.differs(of_original, layer_formats(model)):
                raise NotJudgedError(f"{self._approved}: {why}")
            return self._approved.results(scheme, text, *approved_segments(evaluator, text))
        if not stored and plan.reference is None and evaluator.through == REFERENCE:
            return results  # quantized here, from the original, through the reference
        key = scheme, text, len(result.values)
        if key not in self._own:
            self._own[key] = [replace(own, scheme=scheme) for own in evaluator.reproduced(*key)]
        return self._own[key]


def approved_segments(evaluator: Evaluator, text: str) -> tuple[str, dict[str, Any]]:
    """Return what an approved reference must have in common with an evaluation of a text."""
    tokens = evaluator.token_hash(text)
    return tokens, {"context": evaluator.context_of(text), "bos": evaluator.bos}


def approve(
    report: AccuracyReport, setup: PreparedModel, by: str, at: datetime
) -> ApprovedReference:
    """Return the results of the checkpoint that was judged, approved by a person.

    Raises UsageError if it was not evaluated.
    """
    evaluator, scheme = setup.evaluator, setup.plan.schemes[-1]
    texts = {}
    for text in evaluator.available:
        nll, kl = (find(report.results, scheme, text, metric) for metric in (PERPLEXITY, KL))
        if nll is not None and kl is not None and nll.values and kl.values:
            segments = approved_segments(evaluator, text)
            texts[text] = ApprovedText(*segments, nll.values, kl.values)
    if not texts or evaluator.reference is None:
        raise UsageError("there are no results to approve: the checkpoint was not evaluated")
    formats, layers = approved_formats(layer_formats(evaluator.model_under(scheme).model))
    return ApprovedReference(
        model=evaluator.reference.name,
        model_hash=evaluator.reference.content_hash,
        scheme=scheme,
        content_hash=report.content_hashes.get(scheme, ""),
        formats=formats,
        layers=layers,
        texts=texts,
        approved_by=by,
        approved_at=at.isoformat(),
        failed=tuple(limit.check for limit in report.with_outcome(GateOutcome.FAIL)),
    )


def diagnose_scheme(setup: PreparedModel, scheme: str) -> Diagnosis:
    """Diagnose a scheme's loss on the first text, by layer, other differences and token."""
    evaluator = setup.evaluator
    if not setup.plan.texts:
        return Diagnosis(scheme, None, (), (), (), "no text was evaluated")
    text = setup.plan.texts[0].name
    segments = evaluator.text_ids(text)
    agreement = evaluator.agreement(scheme, text)
    loaded = evaluator.model_under(scheme)
    tokens: tuple[TokenLoss, ...] = ()
    if agreement is not None:
        bos = evaluator.bos == "segment"
        tokens = worst_tokens(agreement, segments, loaded.tokenizer, bos=bos)
    reference = evaluator.reference
    if reference is None or reference.model is None:
        note = "a stored reference has no layers: give the original model"
        return Diagnosis(scheme, None, (), (), tokens, note)
    original, model = reference.model.model, loaded.model
    try:
        differing = differences_outside_layers(original, model)
        folds = evaluator.folds(scheme)
        if not is_foldable(original, model, folds):
            note = "scales are folded into the norms: layers can't be compared one by one"
            return Diagnosis(scheme, None, (), differing, tokens, note)
        kl, layers = losses_of_layers(original, model, folds, segments)
    except (FlexqError, RuntimeError, ValueError, AttributeError) as error:
        return Diagnosis(scheme, None, (), (), tokens, one_line(error))
    return Diagnosis(scheme, kl, layers, differing, tokens)


def gate_records(
    report: AccuracyReport, policy: PolicyIdentity, origin: ResultOrigin, *, at: datetime
) -> list[GateRecord]:
    """Return a record for each judged scheme, in order. at: time-zone aware."""
    schemes = dict.fromkeys(limit.scheme for limit in report.judged)
    return [
        _record(scheme, [limit for limit in report.judged if limit.scheme == scheme],
                report, policy, origin, at)
        for scheme in schemes
    ]  # fmt: skip


def _record(
    scheme: str,
    judged: Sequence[LimitOutcome],
    report: AccuracyReport,
    policy: PolicyIdentity,
    origin: ResultOrigin,
    at: datetime,
) -> GateRecord:
    verdict = verdict_of(judged)
    identity = (origin.run.uuid, policy.fingerprint, report.base, scheme, at.isoformat())
    return GateRecord(
        uuid=name_uuid(" ".join(identity), kind="accuracy gate"),
        model=report.model,
        model_hash=report.model_hash,
        scheme=scheme,
        base=report.base,
        policy=policy.name,
        policy_version=policy.version,
        policy_hash=policy.fingerprint,
        content_hash=report.content_hashes.get(scheme),
        through=report.through,
        reference=report.reference or None,
        reference_hash=report.reference_hash,
        diagnosis=next(
            (diagnosis.values() for diagnosis in report.diagnoses if diagnosis.scheme == scheme),
            None,
        ),
        verdict=verdict.value,
        exit_code=int(exit_code_of((verdict,))),
        limits=tuple(_stored_limit(limit) for limit in judged),
        created_at=at.isoformat(),
        run=origin.run,
        commit=origin.commit,
        device=origin.device,
        environment=origin.environment,
    )


def _stored_limit(limit: LimitOutcome) -> GateLimit:
    values = {field.name: getattr(limit, field.name) for field in fields(GateLimit)}
    return GateLimit(**{**values, "outcome": limit.outcome.value})
