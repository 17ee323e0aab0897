"""The commits that changed cases: binary search by comparisons with a good commit."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial

from flexq_bench.errors import BrokenRevisionError, InfrastructureError, UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.kernels.runtime.files import cache_folder, write_atomically
from flexq_bench.measure.ab import InterleaveRules, Suffices
from flexq_bench.measure.device import describe_device, find_device
from flexq_bench.verdicts import CaseComparison, Comparison, Verdict, confirm
from flexq_bench.verdicts.alert_rule import CONFIDENCE
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.errors import WorkloadError

# Of each bound of a step, at each stage.
_CONFIDENCE = 1 - (1 - CONFIDENCE) / len(InterleaveRules().stages)
_EXIT_CODES_WITHOUT_SEARCH = {
    Verdict.SAME: ExitCode.PASS,
    Verdict.AMBIGUOUS: ExitCode.AMBIGUOUS,
    Verdict.INCORRECT: ExitCode.REGRESSION,
}


class StepOutcome(StrEnum):
    CHANGED = "changed"  # more than half of the change
    UNCHANGED = "unchanged"
    SKIPPED = "skipped"  # it doesn't build, its worker dies, or the result is ambiguous


@dataclass(frozen=True, slots=True)
class BisectionStep:
    """Result of one commit's comparison with good.

    log_ratio: ln(commit / good); None: skipped. pairs: of processes (or placements) that were
    measured; 0: none, or unknown.
    """

    commit: str
    outcome: StepOutcome
    reason: str
    log_ratio: float | None = None
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class ChangeLocation:
    """The commits between which the change lies.

    suspects: the commit that made it; several, oldest first, if commits were skipped.
    last_unchanged: the commit before them. steps: of the search, by commit.
    """

    suspects: tuple[str, ...]
    last_unchanged: str
    steps: Mapping[str, BisectionStep]


@dataclass(frozen=True, slots=True)
class BisectReport:
    """Result of a bisection of `case` between two commits.

    ends: the comparison of bad with good; None: read from the journal. location: None:
    bad and good do not differ, so nothing was searched. change: ln(bad / good) in time; None:
    nothing was searched.
    """

    case: Case
    good: str
    bad: str
    ends: CaseComparison | None
    location: ChangeLocation | None = None
    change: float | None = None

    @property
    def exit_code(self) -> ExitCode:
        """Exit code: a regression if one commit that made the case slower was found.

        One that made it faster is a pass, several suspects are ambiguous. If nothing was searched,
        the comparison of the ends decides.
        """
        if self.location is not None and self.change is not None:
            if len(self.location.suspects) > 1:
                return ExitCode.AMBIGUOUS
            return ExitCode.REGRESSION if self.change > 0 else ExitCode.PASS
        if self.ends is None:
            return ExitCode.MISSING
        return _EXIT_CODES_WITHOUT_SEARCH.get(self.ends.confirmation.verdict, ExitCode.MISSING)


# Of a search: the commit to compare with good next, and when that needs no more looks.
Question = tuple[str, Suffices | None]
Search = Generator[Question, CaseComparison, BisectReport]
Measuring = Generator[Question, CaseComparison, BisectionStep]


def bisect(
    searches: Mapping[Case, Search],
    compare: Callable[[str, Mapping[Case, Suffices | None]], Sequence[CaseComparison]],
) -> dict[Case, BisectReport]:
    """Run searches (`search_case`) of cases; those that ask for one commit share a comparison.

    compare: measures cases of a commit against good, each until its InterleaveRules.suffices is
    satisfied.
    """
    reports: dict[Case, BisectReport] = {}
    asked: dict[Case, Question] = {}

    def go_on(case: Case, resume: Callable[[], Question]) -> None:
        try:
            asked[case] = resume()
        except StopIteration as end:
            reports[case] = end.value

    for case, searching in searches.items():
        go_on(case, partial(next, searching))
    while asked:
        ((commit, _),) = Counter(commit for commit, _ in asked.values()).most_common(1)
        cases = {case: suffices for case, (of, suffices) in asked.items() if of == commit}
        for case in cases:
            del asked[case]
        try:
            compared = {result.case: result for result in compare(commit, cases)}
        except (BrokenRevisionError, UsageError, WorkloadError, InfrastructureError) as error:
            for case in cases:
                go_on(case, partial(searches[case].throw, error))
        else:
            for case in cases:
                go_on(case, partial(searches[case].send, compared[case]))
    return reports


def search_case(
    case: Case,
    good: str,
    commits: Sequence[str],
    journal: Journal,
    *,
    on_step: Callable[[BisectionStep], None],
    on_resume: Callable[[int], None],
    prepare: Callable[[Sequence[str]], None] = lambda _commits: None,
) -> Search:
    """Find the commit that changed a case, by binary search with comparisons to `good`.

    commits: after good, oldest first; the last one is bad. journal: results of the same search if
    it was interrupted; the caller deletes it, after all of its searches. on_step: called with each
    result; on_resume: with the number of results in the journal; prepare: before a commit is
    measured, with those that may be next. A commit that can't be measured (BrokenRevisionError,
    UsageError, or WorkloadError of its project file), or gives no data twice, is skipped; for the
    bad commit the error is raised. Raises InfrastructureError if the machine fails, because
    skipping commits for this reason would change the suspects.
    """
    bad, steps = commits[-1], journal.read()
    ends = None
    if bad in steps:
        on_resume(len(steps))
    else:
        ends = yield bad, None
        confirmed = ends.confirmation
        if confirmed.verdict not in (Verdict.SLOWER, Verdict.FASTER):
            return BisectReport(case, good, bad, ends)
        steps[bad] = BisectionStep(
            bad, StepOutcome.CHANGED, confirmed.reason, confirmed.log_ratio, confirmed.placements
        )
        journal.write(steps)
    total_change = steps[bad].log_ratio
    assert total_change is not None  # bad was not skipped
    on_step(steps[bad])
    suffices = partial(side_is_clear, total_change)

    def measure(commit: str) -> Measuring:
        try:
            compared = yield commit, suffices
            if (
                compared.confirmation.verdict is Verdict.NO_DATA
            ):  # the worker died, perhaps because of the commit: retry
                compared = yield commit, suffices
        except (BrokenRevisionError, UsageError, WorkloadError) as error:
            step = BisectionStep(commit, StepOutcome.SKIPPED, str(error))
        except InfrastructureError as error:
            raise InfrastructureError(
                f"{error}; the search stops at {commit[:10]}: repeat the command to resume it "
                f"({len(steps)} results are stored)"
            ) from error
        else:
            step = step_of(commit, compared.comparison, total_change, compared.detail)
        steps[commit] = step
        journal.write(steps)
        on_step(step)
        return step

    location = yield from search(good, commits, measure, steps, prepare)
    return BisectReport(case, good, bad, ends, location, total_change)


def device_uuid(device: str, gpu: str | None) -> str:
    """Return the UUID of a device. Raises UsageError if its SKU is not `gpu`; None: any."""
    info = describe_device(find_device(device), None)
    if gpu is not None and info.sku != gpu:
        raise UsageError(
            f"the series is of {gpu}, but {device} is {info.sku}: bisect on a machine with {gpu}"
        )
    return info.uuid


def search(
    good: str,
    commits: Sequence[str],
    measure: Callable[[str], Measuring],
    known: Mapping[str, BisectionStep] | None = None,
    prepare: Callable[[Sequence[str]], None] = lambda _commits: None,
) -> Generator[Question, CaseComparison, ChangeLocation]:
    """Find the commit that made the change.

    good: unchanged. commits: after it, oldest first, the last one changed. measure: compares a
    commit with good; the search asks what it asks. known: results of an interrupted search, not
    measured again. prepare: see search_case. Of several changes, finds one at which the level
    crosses half of the total. Raises ValueError without commits.
    """
    if not commits:
        raise ValueError("there is no commit to search")
    steps = dict(known or {})
    low, high = -1, len(commits) - 1
    while True:
        middle = _middle(commits, steps, low, high)
        if middle is None:
            break
        commit = commits[middle]
        if commit not in steps:
            halves = (_middle(commits, steps, *half) for half in ((low, middle), (middle, high)))
            prepare([commits[i] for i in halves if i is not None and commits[i] not in steps])
            steps[commit] = yield from measure(commit)
        outcome = steps[commit].outcome
        if outcome is StepOutcome.CHANGED:
            high = middle
        elif outcome is StepOutcome.UNCHANGED:
            low = middle
    return ChangeLocation(
        suspects=tuple(commits[low + 1 : high + 1]),
        last_unchanged=good if low < 0 else commits[low],
        steps=steps,
    )


def _middle(
    commits: Sequence[str], steps: Mapping[str, BisectionStep], low: int, high: int
) -> int | None:
    """The index nearest to the middle, between two others, that was not skipped; None: none."""
    unskipped = [
        i
        for i in range(low + 1, high)
        if commits[i] not in steps or steps[commits[i]].outcome is not StepOutcome.SKIPPED
    ]
    return min(unskipped, key=lambda i: (abs(2 * i - low - high), i), default=None)


def step_of(
    commit: str, comparison: Comparison, total_change: float, detail: str = ""
) -> BisectionStep:
    """Classify a commit by its comparison with good. total_change: ln(bad / good).

    The threshold is half of the total; if it lies within the bounds, the commit is skipped. Each
    bound has a sixth of 1 % error, because up to six stages ask the same question
    (`side_is_clear`).
    """
    confirmed = confirm(comparison, confidence=_CONFIDENCE)
    pairs = confirmed.placements
    if confirmed.verdict in (Verdict.NO_DATA, Verdict.INCORRECT):
        return BisectionStep(commit, StepOutcome.SKIPPED, detail or confirmed.reason, pairs=pairs)
    sign = 1 if total_change > 0 else -1
    low, high = sorted((sign * confirmed.low, sign * confirmed.high))
    half = abs(total_change) / 2
    if low > half:
        return BisectionStep(
            commit, StepOutcome.CHANGED, confirmed.reason, confirmed.log_ratio, pairs
        )
    if high < half:
        return BisectionStep(
            commit, StepOutcome.UNCHANGED, confirmed.reason, confirmed.log_ratio, pairs
        )
    reason = f"neither side of half the change: {confirmed.reason}"
    return BisectionStep(commit, StepOutcome.SKIPPED, reason, pairs=pairs)


def side_is_clear(total_change: float, compared: CaseComparison, _decided: bool) -> bool:
    """Return True if a step needs no more looks: its side of half the change is clear.

    The verdict on the commit is not the question. If the clocks of the two differ, more looks do
    not help.
    """
    if compared.confirmation.limited_by_clocks:
        return True
    step = step_of(compared.head, compared.comparison, total_change)
    return step.outcome is not StepOutcome.SKIPPED


class Journal:
    """File with the results of a search, from which an interrupted search is resumed.

    Not in the database: results belong to one device and one pair of revisions, are useless after
    the search, and bisection must work without a database.
    """

    def __init__(self, *identity: object) -> None:
        key = hashlib.sha256("\0".join(map(str, identity)).encode()).hexdigest()
        self.path = cache_folder() / "bisect" / f"{key[:32]}.json"

    def read(self) -> dict[str, BisectionStep]:
        """Return the steps by commit; empty: there is no file, or it can't be read."""
        try:
            rows = json.loads(self.path.read_text())
            steps = [
                BisectionStep(**{**row, "outcome": StepOutcome(row["outcome"])}) for row in rows
            ]
        except (OSError, ValueError, TypeError, KeyError):
            return {}
        return {step.commit: step for step in steps}

    def write(self, steps: Mapping[str, BisectionStep]) -> None:
        """Replace the file atomically. Raises CacheError."""
        write_atomically(self.path, json.dumps([asdict(step) for step in steps.values()]).encode())

    def delete(self) -> None:
        """Delete the file, if it exists."""
        with suppress(OSError):
            self.path.unlink()
