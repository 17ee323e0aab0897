"""`gate served`: two engines, the same questions, one verdict; its policy, course and records.

version = 1
alpha = 0.01                     # optional: probability that an equal head fails by accuracy
power = 0.95                     # optional: probability that a loss to detect fails
timeout_s = 300.0                # optional: of a request
concurrency = 32                 # optional: requests at once
allow_not_judged = ["KL of *"]   # optional: patterns of checks that need not be judged

[[accuracy]]                     # none or more
suite = "gsm8k.jsonl"            # a file beside the policy, or a task of lm-eval: name or .yaml
checker = "number"               # of lines that name none: exact, number, choice, regex, code
task_data = "data"               # of a task: folder as of `accuracy --task-data`
few_shot = 5                     # of a task: examples before each question
metric = "exact_match,strict-match"  # of a task: with its filter; default: its first
detect_points = 3.0              # optional, as all that follow: the least loss to detect
accept_points = 0.0              # a loss that is accepted
at_least = 0.6                   # least accepted score of head, for any base
questions = 1319                 # the most that are asked
samples = 1                      # answers to each question
temperature = 0.0                # 0: greedy; else 0.7 with several samples
top_p = 1.0
max_tokens = 512
stop = ["\\n\\n"]
chat = false                     # ask as a user's message

[faults]                         # more empty, cut off, looping or malformed answers than base
detect_points = 2.0

[[speed]]                        # none or more: flexq_bench.served.speed.policy

[kl]                             # KL(base || head) over the likeliest tokens, greedy suites only
mean = 0.05                      # nats a token, at most
top = 10                         # tokens
reference = "checkpoint"         # optional: KL(our evaluation of it || head) instead
questions = 200                  # of a suite, with a reference
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar, Self

from pydantic import model_validator

from flexq_bench.accuracy.records import ResultOrigin, build_record
from flexq_bench.accuracy.results import MetricResult
from flexq_bench.accuracy.setup import best_device, describe_origin
from flexq_bench.ci.accuracy_gate.contract import LimitOutcome
from flexq_bench.ci.accuracy_gate.gate import AccuracyReport, gate_records
from flexq_bench.ci.notifications.events import add_accuracy_gate_events, add_alert_events
from flexq_bench.ci.policy import check_version, find_policy
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.identity import fingerprint
from flexq_bench.db.records import CommitInfo, GateLimit
from flexq_bench.db.store import add_records, put_records
from flexq_bench.errors import FlexqError, UsageError, one_line
from flexq_bench.measure.device import find_device
from flexq_bench.runs.commit_history import store_history
from flexq_bench.runs.lifecycle import OpenRun, open_run
from flexq_bench.schemes.model_files import is_there
from flexq_bench.served import SUITE
from flexq_bench.served.client import Limits
from flexq_bench.served.engines import EngineSpec
from flexq_bench.served.errors import EngineError
from flexq_bench.served.judging import judge_accuracy, judge_divergence, judge_faults
from flexq_bench.served.paired import PairedAnswers, PairedSuite, ask_both, begin, ignores_seed
from flexq_bench.served.questions import FAULTS, Asking, QuestionFile, QuestionSuite, faults_of
from flexq_bench.served.reference import TOKENS_AS_IDS, CheckpointReference
from flexq_bench.served.speed.gate import SpeedReport, judge_speed
from flexq_bench.served.speed.policy import SpeedTable
from flexq_bench.served.speed.records import PROJECT, ServedDevice, speed_records
from flexq_bench.served.task_suites import TaskSuite
from flexq_bench.served.turns import BASE, HEAD, Places, Turns, taking_turns
from flexq_bench.stats.sequential_loss import LossTest
from flexq_bench.verdicts.nightly import record_night
from flexq_bench.workloads.data_files import (
    Amount,
    Count,
    DataTable,
    Entries,
    Flag,
    Natural,
    Share,
    Text,
    Texts,
    read_toml,
    validated,
)
from flexq_bench.workloads.errors import WorkloadError

log = logging.getLogger(__name__)

_FOLDER = "policies/served"
_ACCURACY_SHARE = 0.9  # of alpha; the rest is shared by faults and divergences
_SLOW_S = 60.0  # until an engine is ready, which its users will notice, too
_SAMPLED_TEMPERATURE = 0.7


class SuiteTable(DataTable):
    """A suite of a policy."""

    NAME_KEY: ClassVar[str] = "suite"
    suite: Text
    checker: Text | None = None
    task_data: Text | None = None
    few_shot: Natural | None = None
    metric: Text | None = None
    detect_points: Amount = 3.0
    accept_points: Amount = 0.0
    at_least: Share | None = None
    questions: Count | None = None
    samples: Count = 1
    temperature: Amount | None = None
    top_p: Share = 1.0
    max_tokens: Count = 512
    stop: Texts = ()
    chat: Flag = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.accept_points < self.detect_points <= 100:
            raise WorkloadError(
                f"detect_points is {self.detect_points:g}: give points above accept_points "
                f"({self.accept_points:g}), at most 100"
            )
        is_file = not self.is_task
        of_task = {"task_data": self.task_data, "few_shot": self.few_shot, "metric": self.metric}
        others = of_task if is_file else {"checker": self.checker}
        if other := next((key for key, value in others.items() if value is not None), None):
            kind = "a task of lm-eval" if is_file else "a file of JSON lines"
            raise WorkloadError(f"{other} goes with {kind}, not with {self.suite}")
        if self.samples > 1 and self.temperature == 0:
            raise WorkloadError(f"{self.samples} greedy samples are equal: give a temperature")
        return self

    @property
    def is_task(self) -> bool:
        """True for a task of lm-eval, by its name or file."""
        return Path(self.suite).suffix in ("", ".yaml", ".yml")

    def asking(self, seed: int, concurrency: int, top: int | None) -> Asking:
        """Return how the suite is asked. top: tokens with log-probabilities, if greedy."""
        default = _SAMPLED_TEMPERATURE if self.samples > 1 else 0.0
        temperature = default if self.temperature is None else self.temperature
        return Asking(
            max_tokens=self.max_tokens,
            temperature=temperature,
            top_p=self.top_p,
            samples=self.samples,
            stop=self.stop,
            chat=self.chat,
            logprobs=top if temperature == 0 else None,
            seed=seed,
            concurrency=concurrency,
        )


class FaultsTable(DataTable):
    """Limits of faulty answers."""

    detect_points: Amount = 2.0


class KlTable(DataTable):
    """Limits of the divergence of predictions."""

    mean: Amount
    top: Count = 10
    reference: Text | None = None
    questions: Count = 200


class _PolicyTable(DataTable):
    version: Count
    alpha: Share = 0.01
    power: Share = 0.95
    timeout_s: Amount = 300.0
    concurrency: Count = 32
    allow_not_judged: Texts = ()
    accuracy: Entries[SuiteTable] = ()
    speed: Entries[SpeedTable] = ()
    faults: FaultsTable | None = None
    kl: KlTable | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (0 < self.alpha < 0.5 < self.power < 1):
            raise WorkloadError(
                f"alpha must be below 0.5 and power above it, got {self.alpha} and {self.power}"
            )
        if "alpha" in self.model_fields_set and self.speed and not self.accuracy:
            raise WorkloadError(
                "alpha is of accuracy: leave it out, as verdicts on speed have the confidence of "
                "comparisons"
            )
        if self.timeout_s == 0:
            raise WorkloadError("timeout_s is 0: give the seconds that an answer may take")
        return self


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy named after its file. folder: of the file; None: a bundled one."""

    name: str
    version: int
    fingerprint: str
    table: _PolicyTable
    folder: Path | None

    def with_suites(self, files: Sequence[str], checker: str | None) -> ServedPolicy:
        """Return the policy with these suites in place of its own; none: as it is."""
        if not files:
            return self
        here = Path.cwd()  # not beside the policy
        suites = tuple(
            SuiteTable(
                suite=str(here / Path(file).expanduser()) if Path(file).suffix else file,
                checker=checker,
            )
            for file in files
        )
        return replace(self, table=self.table.model_copy(update={"accuracy": suites}))

    def with_reference(self, source: str | None) -> ServedPolicy:
        """Return the policy with this reference of its [kl]; None: as it is."""
        if source is None:
            return self
        if self.table.kl is None:
            raise UsageError(f"policy {self.name} has no [kl]: add it, with mean")
        kl = self.table.kl.model_copy(update={"reference": str(Path.cwd() / source)})
        return replace(self, table=self.table.model_copy(update={"kl": kl}))


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Engines to compare. labels: names of both in results; empty: as they were given.

    key: sent to both as a bearer token. project,
    commits: if both are commits of a project, its name and theirs by side. alerting: a commit that
    makes the project's engine slower opens an alert.
    """

    base: EngineSpec
    head: EngineSpec
    places: Places = field(default_factory=Places)
    labels: tuple[str, str] = ("", "")
    seed: int = 0
    key: str | None = None
    project: str = ""
    commits: Mapping[str, CommitInfo] = field(default_factory=dict)
    alerting: bool = False

    @property
    def names(self) -> dict[str, str]:
        """The label of each engine in results; they differ."""
        base, head = (
            given or spec.label
            for given, spec in zip(self.labels, (self.base, self.head), strict=True)
        )
        same = base == head
        return {BASE: f"{base} (base)" if same else base, HEAD: f"{head} (head)" if same else head}


def load_served_policy(name_or_path: str) -> ServedPolicy:
    """Load a bundled policy by name, or any policy by the path of its `.toml`.

    Raises WorkloadError if there is none, or if the file is malformed.
    """
    file = find_policy(name_or_path, _FOLDER)
    values = read_toml(file)
    check_version(file.name, values.get("version"))
    table = validated(_PolicyTable, values, file.name)
    folder = file.parent if isinstance(file, Path) else None
    name = file.name.removesuffix(".toml")
    return ServedPolicy(name, table.version, fingerprint(values), table, folder)


def run_served_gate(
    policy: ServedPolicy,
    request: ServedRequest,
    database: Database,
    *,
    progress: Callable[[int], AbstractContextManager[Callable[[], None]]] = lambda total: (
        nullcontext(lambda: None)
    ),
) -> AccuracyReport:
    """Ask both engines, judge head, and store results and decision.

    progress: called with the planned number of answers; its context gives the function that counts
    one. An engine that fails leaves checks not judged, with the reason. Raises UsageError for a
    policy without a suite, or a suite that can't be read.
    """
    course = _Course(policy, request)
    origin = describe_origin(
        request.places.model or "",
        "",
        seed=request.seed,
        device=find_device(best_device()),
        trigger="gate",
    )
    commit = request.commits.get(HEAD, origin.commit)
    origin = replace(origin, run=replace(origin.run, suite=SUITE), commit=commit)
    if request.commits:
        store_history(database, *request.commits.values())  # the line that verdicts belong to
    with (
        open_run(database, origin.run, origin.commit) as run,
        taking_turns(request.base, request.head, replace(request.places, key=request.key)) as turns,
        progress(course.planned) as on_question,
    ):
        limits = list(course.judge(turns, run, origin, on_question))
        report = course.report(limits, turns, origin)
        decided = gate_records(
            report, policy, course.origin_of(HEAD, turns, origin), at=datetime.now(UTC)
        )
        run.store(lambda session: add_records(session, decided))
        run.store(lambda session: add_accuracy_gate_events(session, decided))
    return report


@dataclass
class _Course:
    """The suites of a gate, and what was noticed on the way."""

    policy: ServedPolicy
    request: ServedRequest
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        table = self.policy.table
        if not table.accuracy and not table.speed:
            raise UsageError(
                f"policy {self.policy.name} has no suite and no load: add [[accuracy]] or "
                "[[speed]], or give --suite FILE"
            )
        count = max(1, len(table.accuracy))
        alpha = _ACCURACY_SHARE * table.alpha / count
        others = len(FAULTS) * (table.faults is not None) + (table.kl is not None)
        self._other_alpha = (1 - _ACCURACY_SHARE) * table.alpha / max(1, others * count)
        top = None if table.kl is None else table.kl.top
        self._reference = None
        if table.kl is not None and table.kl.reference is not None:
            self._reference = self._path(table.kl.reference)
            if not is_there(self._reference):
                raise UsageError(f"no reference {self._reference}: give a checkpoint or a model")
        self._suites = [self._paired(suite, alpha, top) for suite in table.accuracy]
        self._limits = Limits(total_s=table.timeout_s, idle_s=table.timeout_s)

    @property
    def planned(self) -> int:
        """The most answered questions, of both engines."""
        return 2 * sum(paired.planned for paired in self._suites)

    def _paired(self, table: SuiteTable, alpha: float, top: int | None) -> PairedSuite:
        test = LossTest(
            table.detect_points / 100, table.accept_points / 100, alpha, self.policy.table.power
        )
        policy = self.policy.table
        faults = None
        if policy.faults is not None:
            more = policy.faults.detect_points / 100
            faults = LossTest(more, 0.0, self._other_alpha, policy.power)
        asking = table.asking(self.request.seed, policy.concurrency, top)
        suite = self._suite(table)
        if not suite.generates and (asking.chat or asking.samples > 1):
            raise UsageError(
                f"{suite.name} compares log-probabilities of texts: leave chat and samples out"
            )
        referenced = 0
        if policy.kl is not None and self._reference is not None and asking.logprobs is not None:
            referenced = policy.kl.questions
            asking = replace(asking, extra=TOKENS_AS_IDS)
        return PairedSuite(suite, asking, test, faults, table.questions, table.at_least, referenced)

    def _suite(self, table: SuiteTable) -> QuestionSuite:
        path = self._path(table.suite)
        if not table.is_task:
            return QuestionFile(path.stem, path, table.checker)
        return TaskSuite(
            str(path) if path.suffix else table.suite,
            data=None if table.task_data is None else self._path(table.task_data),
            few_shot=table.few_shot,
            metric=table.metric,
            seed=self.request.seed,
        )

    def _path(self, text: str) -> Path:
        """Return a path of the policy, which is relative to its folder."""
        return (self.policy.folder or Path()) / Path(text).expanduser()

    def judge(
        self, turns: Turns, run: OpenRun, origin: ResultOrigin, on_question: Callable[[], None]
    ) -> Iterator[GateLimit]:
        """Ask and judge suite after suite; what was answered is stored as it is known."""
        table, asked = self.policy.table, []
        failure = ""
        for paired in self._suites:
            answers = begin(paired, seed=self.request.seed)
            answers.failure = failure  # of an earlier suite: its engine is not waited for again
            asked.append(answers)
            try:
                if not failure:
                    ask_both(
                        turns,
                        answers,
                        limits=self._limits,
                        key=self.request.key,
                        on_question=on_question,
                    )
            finally:
                self._store(answers, turns, run, origin)
            failure = answers.failure
            self._note_retries(answers)
            yield judge_accuracy(answers)
            yield from judge_faults(answers)
        yield from self._judge_divergences(turns, asked)
        if table.speed:
            yield from self._judge_speed(turns, run, origin, failure)
        if not failure and any(a.paired.asking.temperature > 0 for a in asked):
            self._note_seeds(turns)

    def _judge_divergences(
        self, turns: Turns, asked: Sequence[PairedAnswers]
    ) -> Iterator[GateLimit]:
        kl, problem = self.policy.table.kl, ""
        judged = [answers for answers in asked if answers.paired.asking.logprobs is not None]
        if kl is None or not judged:
            return
        if self._reference is not None:
            if best_device() != "cpu":
                turns.end()  # engines take all of a GPU's memory
            try:
                reference = CheckpointReference(str(self._reference))
                for answers in judged:
                    reference.compare(answers, kl.top)
            except FlexqError as error:
                problem = one_line(error)
        name = "" if self._reference is None else self._reference.name
        for answers in judged:
            yield judge_divergence(
                answers,
                mean=kl.mean,
                alpha=self._other_alpha,
                reference=name,
                problem=problem,
            )

    def _judge_speed(
        self, turns: Turns, run: OpenRun, origin: ResultOrigin, failure: str
    ) -> Sequence[GateLimit]:
        """Measure and judge the speed; what was measured is stored."""
        request = self.request
        commits = request.commits
        labels = {side: commit.sha for side, commit in commits.items()} or request.names
        report = judge_speed(
            [table.beside(self.policy.folder) for table in self.policy.table.speed],
            turns,
            power=self.policy.table.power,
            seed=self.request.seed,
            labels=labels,
            key=request.key,
            failure=failure,
            on_progress=log.info,
        )
        records = [
            record
            for side, label in request.names.items()
            for record in speed_records(
                report,
                side,
                label="" if commits else label,  # a commit is the point of a series, no series
                commit=commits.get(side, origin.commit),
                device=origin.device,
                occasion=f"{run.info.uuid} {side}",
                environment=origin.environment,
                project=request.project or PROJECT,
                seed=request.seed,
            )
        ]
        run.store(lambda session: put_records(session, records))
        if commits and not any(commit.dirty for commit in commits.values()):
            run.store(lambda session: self._store_verdicts(session, report, origin))
        return report.limits

    def _store_verdicts(self, session: Session, report: SpeedReport, origin: ResultOrigin) -> None:
        """Store the verdicts on a project's commits, with their alerts, as of kernels."""
        night = record_night(
            session,
            report.sound,
            ServedDevice(origin.device, self.request.project),
            {commit.sha: commit for commit in self.request.commits.values()},
            alerting=self.request.alerting,
        )
        add_alert_events(session, night.opened, night.changed)
        self.notes += [f"alert {alert} opened" for alert in night.opened]
        self.notes += [change.text for change in night.changed]

    def _note_retries(self, answers: PairedAnswers) -> None:
        for name in (BASE, HEAD):
            asked = [
                answer for scored in answers.scored[name].values() for answer in scored.answers
            ]
            if again := sum(answer.retries > 0 for answer in asked):
                self.notes.append(
                    f"{name}: {again} of {len(asked)} requests of {answers.paired.suite.name} were "
                    "sent again (rate-limited, or the connection was lost before an answer)"
                )

    def _note_seeds(self, turns: Turns) -> None:
        names = (HEAD,) if turns.share_a_place else (BASE, HEAD)
        for name in names:
            try:
                ignored = ignores_seed(turns, name, limits=self._limits, key=self.request.key)
            except EngineError as error:  # what was judged stays
                self.notes.append(f"whether it ignores the seed is not known: {error}")
                return
            if ignored:
                self.notes.append(
                    f"{name} ignores the seed: equal requests had different answers, so its "
                    "samples can't be repeated"
                )

    def report(
        self, limits: Sequence[GateLimit], turns: Turns, origin: ResultOrigin
    ) -> AccuracyReport:
        """Return the gate's report."""
        names = self.request.names
        warnings = [
            f"{name} was ready after {seconds:.0f} s"
            for name, seconds in sorted(turns.ready_s.items())
            if seconds > _SLOW_S
        ]
        served = {name: turns.models.get(name) for name in (BASE, HEAD)}
        if None not in served.values() and served[BASE] != served[HEAD]:
            warnings.append(f"base serves {served[BASE]}, head {served[HEAD]}")
        return AccuracyReport(
            model=self._model(HEAD, turns),
            model_hash="",
            base=names[BASE],
            head=names[HEAD],
            policy=self.policy.name,
            commit=origin.commit.sha,
            device=origin.device.sku,
            judged=tuple(self._outcome(limit, names[HEAD]) for limit in limits),
            warnings=(*warnings, *self.notes),
        )

    def _outcome(self, limit: GateLimit, head: str) -> LimitOutcome:
        outcome = GateOutcome(limit.outcome)
        patterns = self.policy.table.allow_not_judged
        is_allowed = any(fnmatchcase(limit.check, pattern) for pattern in patterns)
        return LimitOutcome(
            head,
            limit.check,
            outcome,
            limit.reason,
            limit.limit,
            base=limit.base,
            value=limit.value,
            change=limit.change,
            low=limit.low,
            high=limit.high,
            unit=limit.unit,
            detectable=limit.detectable,
            coverage=limit.coverage,
            details=limit.details,
            allowed=outcome is GateOutcome.NOT_JUDGED and is_allowed,
        )

    def origin_of(self, name: str, turns: Turns, origin: ResultOrigin) -> ResultOrigin:
        """Return the origin of an engine's results."""
        return replace(origin, model=self._model(name, turns))

    def _model(self, name: str, turns: Turns) -> str:
        other = HEAD if name == BASE else BASE
        known = turns.models.get(name) or turns.models.get(other)
        return known or self.request.places.model or "unknown"

    def _store(
        self, answers: PairedAnswers, turns: Turns, run: OpenRun, origin: ResultOrigin
    ) -> None:
        for name in (BASE, HEAD):
            own = self.origin_of(name, turns, origin)
            records = [
                build_record(result, replace(own, run=run.info))
                for result in self._results(answers, name, turns)
            ]
            run.store(lambda session, records=records: add_records(session, records))  # type: ignore[misc]

    def _results(self, answers: PairedAnswers, name: str, turns: Turns) -> Iterator[MetricResult]:
        """Yield an engine's score, faults and unanswered questions of a suite."""
        scored = dict(sorted(answers.scored[name].items()))
        suite, asking = answers.paired.suite, answers.paired.asking
        label = self.request.names[name]
        tokens = [
            a.completion_tokens
            for scored_answers in scored.values()
            for a in scored_answers.answers
        ]
        observed: Mapping[str, object] = {
            "engine": label,
            "questions": list(scored),
            "completion_tokens": sum(count or 0 for count in tokens),
            "ready_s": turns.ready_s.get(name),
            "failure": answers.failure,
        }
        values = {
            i: scored_answers.score
            for i, scored_answers in scored.items()
            if scored_answers.score is not None
        }
        rows: dict[str, tuple[str, list[float]]] = {
            suite.metric: ("higher", list(values.values())),
        }
        for kind in FAULTS:
            rows[f"{kind} answers"] = ("lower", [faults_of(scored[i])[kind] for i in values])
        missing = [float(scored_answers.failure is not None) for scored_answers in scored.values()]
        rows["unanswered"] = ("lower", missing)
        for metric, (direction, row) in rows.items():
            count = len(row)
            mean = sum(row) / count if count else None
            spread = sum((v - mean) ** 2 for v in row) if mean is not None else 0.0
            yield MetricResult(
                scheme=label,
                task=suite.name,
                task_version="1",
                data_hash=suite.data_hash,
                metric=metric,
                direction=direction,  # type: ignore[arg-type]
                value=mean,
                standard_error=(spread / count / (count - 1)) ** 0.5 if count > 1 else None,
                n_items=count,
                values=tuple(row),
                parameters=asking.parameters,
                detail="" if mean is not None else answers.failure or "nothing was answered",
                observed=observed if metric == suite.metric else {},
            )
