"""The contract of a check of the accuracy gate: its table of a policy, its input, its outcomes.

A check is one file in `checks/`, and a line in the registry there (`checks/__init__.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from flexq_bench.accuracy.approved import ApprovedReference
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.results import FULL_PRECISION, PERPLEXITY, Bos, MetricResult
from flexq_bench.accuracy.setup import PreparedModel
from flexq_bench.ci.accuracy_gate.results import SchemeResults
from flexq_bench.ci.accuracy_gate.text_test import TextPlan, TextTest
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.errors import FlexqError, one_line
from flexq_bench.kernels.errors import KernelError
from flexq_bench.workloads.data_files import DataTable
from flexq_bench.workloads.errors import WorkloadError

LimitT = TypeVar("LimitT", bound=DataTable)
ALL_TOKENS = 2**62  # of a text, up to the policy's max_tokens


class NotJudgedError(FlexqError):
    """A check can't judge a model here; the message is the reason that the report gives."""


class Stage(Enum):
    """Time at which a check runs, and what it may read of its context then."""

    FOLDERS = "folders"  # first, even if the model can't be loaded: the folders
    MODEL = "model"  # while the scheme's model is in memory: all but the results
    RESULTS = "results"  # after the evaluation: everything


@dataclass(frozen=True, slots=True)
class LimitOutcome:
    """One limit of the policy for one scheme.

    change, low, high: in `unit`; None: not judged, for the given reason. limit: in words.
    detectable: the least loss that these data can detect with the policy's power and alpha, in
    `unit`; None: not defined for such a limit, or no loss is small enough. text: the text that was
    judged; empty: none. coverage: how much was judged, as `2,550 of 15,810 tokens`. cause: a
    sentence that explains a failure. details: lines that a report shows after its table. allowed:
    the policy allows that it is not judged.
    """

    scheme: str
    check: str  # for example "perplexity of wikitext", "acc of piqa", "parity of kernels"
    outcome: GateOutcome
    reason: str
    limit: str
    base: float | None = None
    value: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    detectable: float | None = None
    text: str = ""
    coverage: str = ""
    cause: str = ""
    details: tuple[str, ...] = ()
    allowed: bool = False


class Check(ABC, Generic[LimitT]):
    """One check. key: of its table in a policy, `[key]`, or `[[key]]` if `repeated`.

    planned: its tests have a planned power, and share a half of `alpha` with others of this kind.
    """

    key: ClassVar[str]
    table: type[LimitT]
    repeated: ClassVar[bool] = False
    stage: ClassVar[Stage] = Stage.RESULTS
    planned: ClassVar[bool] = False

    @abstractmethod
    def names(self, limit: LimitT) -> tuple[str, ...]:
        """Return the names of its outcomes, as in LimitOutcome.check and `allow_not_judged`."""

    def texts(self, limit: LimitT) -> tuple[str, ...]:
        """Return the names of the texts that it judges."""
        return ()

    def tests(self, limit: LimitT) -> int:
        """Return the number of its tests that can fail by chance: its share of `alpha`."""
        return 0

    def tokens_needed(self, limit: LimitT) -> int:
        """Return the least number of tokens of each of its texts; ALL_TOKENS: all."""
        return 0

    def check_table(self, limit: LimitT, power: PlannedPower) -> None:
        """Raise WorkloadError if a table makes no sense in a policy of these error rates."""

    def located(self, limit: LimitT, folder: Path | None) -> LimitT:
        """Return the table with its files as paths. folder: the policy's; None: it has none."""
        return limit

    def text_plan(self, limit: LimitT, power: PlannedPower, alpha: float) -> TextPlan | None:
        """Return the test that decides how much of its text is evaluated; None: there is none."""
        return None

    @abstractmethod
    def judge(self, limit: LimitT, context: CheckContext) -> Iterable[LimitOutcome]:
        """Judge a scheme by a limit. Raises FlexqError with the reason if it can't be judged."""


@dataclass(frozen=True, slots=True)
class CheckLimit:
    """A table of a policy, and the check that it belongs to."""

    check: Check[DataTable]
    table: DataTable

    @property
    def names(self) -> tuple[str, ...]:
        return self.check.names(self.table)

    @property
    def texts(self) -> tuple[str, ...]:
        return self.check.texts(self.table)

    @property
    def tests(self) -> int:
        return self.check.tests(self.table)


@dataclass(frozen=True, slots=True)
class PlannedPower:
    """Error rates of a policy. detect: percent of perplexity; None: nothing is planned.

    power: probability to detect that loss; alpha: to fail a model without one.
    """

    detect: float | None = None
    power: float = 0.95
    alpha: float = 0.01


class PolicyIdentity(Protocol):
    """Identity of a policy in decisions. version: of the file format; fingerprint: SHA-256."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class AccuracyPolicy:
    """A policy named after its file. None: as described in policy.py.

    limits: in the order of the registry of checks. allow_not_judged: see `allows`.
    """

    name: str
    version: int  # of the file format
    fingerprint: str  # SHA-256 of the file's content, in hexadecimal digits
    schemes: tuple[str, ...]
    base: str
    limits: tuple[CheckLimit, ...]
    context: int | None = None
    max_tokens: int | None = None
    limit: int | None = None
    planned: PlannedPower = PlannedPower()
    bos: Bos | None = None
    chat_template: bool = False
    few_shot: int | None = None
    allow_not_judged: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the texts that have a limit, each once."""
        return tuple(dict.fromkeys(text for limit in self.limits for text in limit.texts))

    def of(self, table: type[LimitT]) -> tuple[LimitT, ...]:
        """Return the policy's tables of one type, in the file's order."""
        return tuple(limit.table for limit in self.limits if isinstance(limit.table, table))

    def allows(self, check: str) -> bool:
        """Return True if a check of this name need not be judged: a pattern names it."""
        return any(fnmatchcase(check, pattern) for pattern in self.allow_not_judged)

    @property
    def planned_alpha(self) -> float:
        """The alpha of each planned test: all share a half, or all of it without other tests."""
        share = 0.5 if self._tests(planned=False) else 1.0
        return share * self.planned.alpha / max(1, self._tests(planned=True))

    @property
    def other_alpha(self) -> float | None:
        """The alpha of each test without a plan; None: nothing is planned."""
        count = self._tests(planned=False)
        if self.planned.detect is None or count == 0:
            return None
        return self.planned.alpha / 2 / count

    def _tests(self, *, planned: bool) -> int:
        return sum(limit.tests for limit in self.limits if limit.check.planned is planned)

    def text_plans(self) -> Mapping[str, TextPlan]:
        """Return the planned test of each text that has one; empty without `detect`."""
        alpha = self.planned_alpha
        plans = {
            text: limit.check.text_plan(limit.table, self.planned, alpha)
            for limit in self.limits
            for text in limit.texts
            if limit.check.planned
        }
        return {text: plan for text, plan in plans.items() if plan is not None}

    def tokens_needed(self) -> dict[str, int]:
        """Return the least number of tokens of each text that its limits need."""
        needed: dict[str, int] = {}
        for limit in self.limits:
            for text in limit.texts:
                count = limit.check.tokens_needed(limit.table)
                needed[text] = max(count, needed.get(text, 0))
        return needed


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Folders of an evaluation.

    judged: the one that will be served; None: a scheme's model is quantized in memory. original:
    what it is compared with; None: it is no folder, but stored predictions or a name on the hub.
    """

    judged: Path | None = None
    original: Path | None = None


Early = Mapping[CheckLimit, Sequence[LimitOutcome]]  # judged before the results were there


@dataclass(frozen=True)
class CheckContext:
    """Data of one scheme of a model that a check may read.

    every_result: with repeated segments of texts. distinct: by text, the indices of its distinct
    segments, and the number of all. prepared: None: the model can't be loaded. shares: the part of
    the error probabilities of a text's limits that this look may spend. reproduce: results of the
    original quantized here, see `reproduced`. approved: those of a checkpoint that a person
    approved, in place of those; None: there are none of the scheme. progress: shows the current
    activity. quick: a first opinion is enough.
    """

    policy: AccuracyPolicy
    scheme: str
    base: str
    folders: ModelFolders
    prepared: PreparedModel | None
    every_result: SchemeResults
    distinct: Mapping[str, tuple[Sequence[int], int]] = field(default_factory=dict)
    tests: Mapping[str, TextTest] = field(default_factory=dict)
    share: Callable[[str], float] = lambda text: 1.0
    reproduce: Callable[[str], Sequence[MetricResult]] | None = None
    approved: ApprovedReference | None = None
    progress: Callable[[str], None] = lambda what: None
    quick: bool = False
    seed: int = 0

    @property
    def setup(self) -> PreparedModel:
        """The loaded model and its plan. Raises NotJudgedError if it can't be loaded."""
        if self.prepared is None:
            raise NotJudgedError("the model can't be loaded")
        return self.prepared

    @property
    def model(self) -> LoadedModel:
        """The judged model, in memory. Raises errors of Evaluator.model_under."""
        return self.setup.evaluator.model_under(self.scheme)

    @property
    def original(self) -> LoadedModel:
        """The model to compare with. Raises NotJudgedError if there are only its predictions."""
        reference = self.setup.evaluator.reference
        if reference is None:
            return self.setup.evaluator.model_under(FULL_PRECISION)
        if reference.model is None:
            raise NotJudgedError("a stored reference has predictions alone: give the original")
        return reference.model

    @cached_property
    def results(self) -> SchemeResults:
        """The results of the scheme and its base on the distinct segments of each text."""
        return self.every_result.without_repeats(self.distinct)

    def coverage(self, text: str) -> str:
        """Format the number of tokens of a text that were evaluated: `2,550 of 15,810 tokens`."""
        result = self.every_result.find(self.scheme, text, PERPLEXITY)
        if result is None or not result.values or text not in self.distinct:
            return ""
        available = result.n_items // len(result.values) * self.distinct[text][1]
        part = "all" if result.n_items == available else f"{result.n_items:,} of"
        return f"{part} {available:,} tokens"

    def outcomes(self, limit: CheckLimit) -> list[LimitOutcome]:
        """Judge the scheme by a limit: one outcome of each name at least, or none if it is exempt.

        What can't be judged is not judged, for the reason that the error gives. No policy allows
        that a check breaks.
        """
        judged: list[LimitOutcome] = []
        breaks = False
        try:
            judged.extend(limit.check.judge(limit.table, self))
        except (FlexqError, KernelError, RuntimeError) as error:
            breaks = not isinstance(error, FlexqError | KernelError)
            judged += self.not_judged(limit, one_line(error), {outcome.check for outcome in judged})
        return [
            replace(
                outcome,
                allowed=outcome.outcome is GateOutcome.NOT_JUDGED
                and not breaks
                and self.policy.allows(outcome.check),
                coverage=outcome.coverage or (self.coverage(outcome.text) if outcome.text else ""),
            )
            for outcome in judged
        ]

    def after_failure(self, failure: LimitOutcome, early: Early) -> Iterator[LimitOutcome]:
        """Return the outcomes of a scheme that was not evaluated: of folders, the rest not judged.

        failure: the first of them, which has the reason.
        """
        yield failure
        for limit in self.policy.limits:
            if limit.check.stage is Stage.FOLDERS:
                yield from early[limit]
            else:
                yield from self.not_judged(limit, "nothing was evaluated")

    def not_judged(
        self, limit: CheckLimit, reason: str, known: Collection[str] = ()
    ) -> list[LimitOutcome]:
        """Return an outcome for each name of a limit, other than the known ones."""
        return [
            LimitOutcome(
                self.scheme,
                name,
                GateOutcome.NOT_JUDGED,
                reason,
                "",
                text=next(iter(limit.texts), ""),
            )
            for name in limit.names
            if name not in known
        ]

    def reproduced(self, text: str) -> SchemeResults:
        """Return the results to compare with, on distinct segments: see `reproduce`.

        Raises NotJudgedError, or another UsageError, if that can't be repeated.
        """
        if self.reproduce is None:
            raise NotJudgedError("nothing to compare with")
        own = SchemeResults(self.scheme, self.base, self.reproduce(text), {})
        return own.without_repeats(self.distinct)


def check_any(limit: DataTable) -> None:
    """Raise WorkloadError if a table has a subject, but no limit."""
    optional = [name for name, field in type(limit).model_fields.items() if not field.is_required()]
    if all(getattr(limit, name) is None for name in optional):
        raise WorkloadError(f"limits nothing: add {', '.join(optional[:-1])} or {optional[-1]}")
