"""The commit that changed a case: binary search by comparisons with a good commit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum

from db import queries
from db.engine import open_database
from flexq_bench.errors import BrokenRevisionError, InfrastructureError, UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.measure.ab import CaseComparison
from flexq_bench.measure.device import describe_device, find_device
from flexq_bench.verdicts import Confirmation, Verdict
from kernels.runtime.files import cache_folder, write_atomically
from workloads.case import Case
from workloads.gemm import GemmWorkload

_NOTHING_TO_SEARCH = {
    Verdict.SAME: ExitCode.PASS,
    Verdict.AMBIGUOUS: ExitCode.AMBIGUOUS,
    Verdict.INCORRECT: ExitCode.REGRESSION,
}


class Outcome(StrEnum):
    CHANGED = "changed"  # nearer to bad than to good
    UNCHANGED = "unchanged"
    SKIPPED = "skipped"  # no answer: it doesn't build, its worker dies, or noise hides it


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one commit's comparison with good. log_ratio: ln(commit / good); None: skipped."""

    commit: str
    outcome: Outcome
    reason: str
    log_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class ChangeLocation:
    """The commits between which the change lies.

    suspects: the commit that made it; several where those between had no answer, oldest first.
    last_unchanged: the commit before them. steps: of the search, by commit.
    """

    suspects: tuple[str, ...]
    last_unchanged: str
    steps: Mapping[str, Step]


@dataclass(frozen=True, slots=True)
class BisectReport:
    """Result of a bisection of `case` between two commits.

    ends: the comparison of bad with good; None: known from an interrupted search. location: None:
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
        return _NOTHING_TO_SEARCH.get(self.ends.confirmation.verdict, ExitCode.MISSING)


def bisect(
    case: Case,
    good: str,
    commits: Sequence[str],
    compare: Callable[[str], CaseComparison],
    journal: Journal,
    *,
    on_step: Callable[[Step], None],
    on_resume: Callable[[int], None],
) -> BisectReport:
    """Find the commit that changed a case, by comparisons with `good`.

    commits: after good, oldest first; the last one is bad. compare: measures a commit against
    good. journal: answers of an interrupted search of the same; forgotten when this one ends.
    on_step: called with each answer; on_resume: with the number of answers of an interrupted
    search. A commit that can't be measured (BrokenRevisionError, UsageError) is skipped, and so is
    one that twice gives no data; of the bad commit the error is raised. Raises InfrastructureError
    where the machine fails: what it skips changes which commits are suspected.
    """
    bad, steps = commits[-1], journal.read()
    ends = None
    if bad in steps:
        on_resume(len(steps))
    else:
        ends = compare(bad)
        confirmed = ends.confirmation
        if confirmed.verdict not in (Verdict.SLOWER, Verdict.FASTER):
            return BisectReport(case, good, bad, ends)
        steps[bad] = Step(bad, Outcome.CHANGED, confirmed.reason, confirmed.log_ratio)
        journal.write(steps)
    whole = steps[bad].log_ratio
    assert whole is not None  # it was judged
    on_step(steps[bad])

    def ask(commit: str) -> Step:
        try:
            compared = compare(commit)
            if compared.confirmation.verdict is Verdict.NO_DATA:  # its worker died: of the commit?
                compared = compare(commit)
        except (BrokenRevisionError, UsageError) as error:
            step = Step(commit, Outcome.SKIPPED, str(error))
        except InfrastructureError as error:
            raise InfrastructureError(
                f"{error}; the search stops at {commit[:10]}, and the same one goes on there "
                f"({len(steps)} answers are kept)"
            ) from error
        else:
            step = step_of(commit, compared.confirmation, whole, compared.detail)
        steps[commit] = step
        journal.write(steps)
        on_step(step)
        return step

    location = search(good, commits, ask, steps)
    journal.forget()
    return BisectReport(case, good, bad, ends, location, whole)


def case_of_series(series: str, db: str | None) -> tuple[Case, str | None]:
    """The case of a stored series and its GPU, or of a case's key (None: any GPU).

    Raises UsageError if there is no such series, WorkloadError if the key has another form, and
    what opening the database `db` raises.
    """
    if not series.isdecimal():
        return Case.from_key(series), None
    with open_database(db, read_only=True) as database, database.session() as session:
        rows = [row for row in queries.list_series(session) if row.id == int(series)]
    if not rows:
        raise UsageError(f"no series {series}: flexq-bench list series shows those there are")
    (row,) = rows
    keyed = Case(
        row.kernel,
        GemmWorkload(row.m, row.n, row.k),
        variant=row.variant,
        stage="linear" if row.stage == "linear" else "gemm",
        cache="hot" if row.cache == "hot" else "cold",
    )
    return keyed, row.gpu


def device_uuid(device: str, gpu: str | None) -> str:
    """The UUID of a device by name. Raises UsageError if it is not a `gpu`; None: any will do."""
    info = describe_device(find_device(device), None)
    if gpu is not None and info.sku != gpu:
        raise UsageError(
            f"the series is of {gpu} and {device} is {info.sku}: bisect where such a one is"
        )
    return info.uuid


def search(
    good: str,
    commits: Sequence[str],
    ask: Callable[[str], Step],
    known: Mapping[str, Step] | None = None,
) -> ChangeLocation:
    """Find the commit that made the change.

    good: unchanged. commits: after it, oldest first, the last one changed. ask: compares a commit
    with good. known: answers of an earlier search, not asked again. Of several changes one is
    found, where the level crosses half of the whole. Raises ValueError if there is no commit.
    """
    if not commits:
        raise ValueError("there is no commit to search")
    steps = dict(known or {})
    low, high = -1, len(commits) - 1
    while True:
        open_ones = [
            i
            for i in range(low + 1, high)
            if commits[i] not in steps or steps[commits[i]].outcome is not Outcome.SKIPPED
        ]
        if not open_ones:
            break
        middle = min(open_ones, key=lambda i: (abs(2 * i - low - high), i))
        commit = commits[middle]
        if commit not in steps:
            steps[commit] = ask(commit)
        outcome = steps[commit].outcome
        if outcome is Outcome.CHANGED:
            high = middle
        elif outcome is Outcome.UNCHANGED:
            low = middle
    return ChangeLocation(
        suspects=tuple(commits[low + 1 : high + 1]),
        last_unchanged=good if low < 0 else commits[low],
        steps=steps,
    )


def step_of(commit: str, confirmed: Confirmation, whole: float, detail: str = "") -> Step:
    """The answer of a comparison with good about a commit, when bad is `whole` (ln) away from good.

    The line is half of the whole: a commit that the 99 % bounds put on neither side has no answer.
    """
    if confirmed.verdict in (Verdict.NO_DATA, Verdict.INCORRECT):
        return Step(commit, Outcome.SKIPPED, detail or confirmed.reason)
    towards = 1 if whole > 0 else -1
    low, high = sorted((towards * confirmed.low, towards * confirmed.high))
    half = abs(whole) / 2
    if low > half:
        return Step(commit, Outcome.CHANGED, confirmed.reason, confirmed.log_ratio)
    if high < half:
        return Step(commit, Outcome.UNCHANGED, confirmed.reason, confirmed.log_ratio)
    return Step(commit, Outcome.SKIPPED, f"neither side of half the change: {confirmed.reason}")


class Journal:
    """The answers of a search in a file, so that an interrupted one goes on.

    A file and not the database: answers belong to one device and one pair of revisions, are of no
    use once the search is over, and a case can be bisected where no database is.
    """

    def __init__(self, *identity: object) -> None:
        key = hashlib.sha256("\0".join(map(str, identity)).encode()).hexdigest()
        self.path = cache_folder() / "bisect" / f"{key[:32]}.json"

    def read(self) -> dict[str, Step]:
        """By commit; empty: nothing was begun, or the file can't be read."""
        try:
            rows = json.loads(self.path.read_text())
            steps = [Step(**{**row, "outcome": Outcome(row["outcome"])}) for row in rows]
        except (OSError, ValueError, TypeError, KeyError):
            return {}
        return {step.commit: step for step in steps}

    def write(self, steps: Mapping[str, Step]) -> None:
        """Keep these; a process that is killed meanwhile leaves the old ones. Raises CacheError."""
        write_atomically(self.path, json.dumps([asdict(step) for step in steps.values()]).encode())

    def forget(self) -> None:
        """The search is over."""
        with suppress(OSError):
            self.path.unlink()
