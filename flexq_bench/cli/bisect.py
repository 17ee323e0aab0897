"""`flexq-bench bisect`: the commit between two revisions that changed a series."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.compare import ProcessesOption, RepositoryOption, progress
from flexq_bench.cli.options import (
    BackendChoice,
    BackendOption,
    DbOption,
    DeviceOption,
    JsonFlag,
    SeedOption,
)
from flexq_bench.cli.output import console, plain, print_json, say
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import INTERRUPTED, ExitCode

if TYPE_CHECKING:
    from ci.bisect import Found, Journal, Step
    from flexq_bench.measure.ab import CaseComparison, InterleaveRules
    from workloads.case import Case


def bisect(
    series: Annotated[
        str, typer.Argument(help="Its id (list series), or a case: 'empty gemm cold m1n1k1'.")
    ],
    good: Annotated[str, typer.Option("--good", metavar="REV", help="Before the change.")],
    bad: Annotated[str, typer.Option("--bad", metavar="REV", help="With the change.")],
    backend: BackendOption = BackendChoice.AUTO,
    device: DeviceOption = None,
    processes: ProcessesOption = 6,
    repository: RepositoryOption = ".",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Ask again what an interrupted search asked already.")
    ] = False,
    seed: SeedOption = 0,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the commit that made a series slower or faster, by interleaved comparisons with GOOD.

    Commits that don't build, whose worker fails, or that noise hides are skipped, and said. An
    interrupted search goes on where it was when it is started again.

    Exit code 0: nothing slower was found (BAD is no slower, or the change is for the faster); 1:
    the commit that made it slower was found; 3: it is one of several, or GOOD and BAD can't be told
    apart; 4: BAD or GOOD has no data; 130: interrupted.
    """
    from ci.bisect import Journal
    from flexq_bench.cli.case_selection import chosen_device
    from flexq_bench.measure.ab import InterleaveRules
    from flexq_bench.measure.ab.revisions import commits_between, resolve_pair
    from flexq_bench.repository.worktrees import repository_of

    folder = repository_of(Path(repository))
    first, last = (revision.commit for revision in resolve_pair(folder, good, bad))
    commits = commits_between(folder, first, last)
    if not commits:
        raise UsageError(f"no commit between {good} and {bad} changes the code: nothing to search")
    name = chosen_device(backend, device)
    case, gpu = _case_of(series, db)
    device_key = _check_device(name, gpu)
    rules = InterleaveRules.with_processes(processes)
    journal = Journal(case.key, first, last, device_key, seed, rules)
    if fresh:
        journal.forget()
    hunt = _Hunt(folder, first, commits, case, name, seed, rules, journal, as_json)
    try:
        raise typer.Exit(hunt.run())
    except KeyboardInterrupt:
        say(console(stderr=True), "interrupted: the same command goes on where this one was")
        raise typer.Exit(INTERRUPTED) from None


@dataclass(frozen=True)
class _Hunt:
    repository: Path
    good: str
    commits: Sequence[str]  # the last one is bad
    case: Case
    device: str
    seed: int
    rules: InterleaveRules
    journal: Journal
    as_json: bool

    def run(self) -> int:
        from ci.bisect import Outcome, Step, search

        journal = self.journal
        bad = self.commits[-1]
        steps = journal.read()
        if bad not in steps:
            compared = self._compare(bad)
            ends = _ends(compared)
            if ends is not None:
                self._say_ends(compared, ends)
                return int(ends)
            confirmed = compared.confirmation
            steps[bad] = Step(bad, Outcome.CHANGED, confirmed.reason, confirmed.log_ratio)
            journal.write(steps)
        else:
            self._say(f"going on with {len(steps)} answers of an interrupted search")
        whole = steps[bad].log_ratio
        assert whole is not None  # it was judged
        self._say_step(steps[bad])
        found = search(self.good, self.commits, self._asking(steps, whole), steps)
        journal.forget()
        return self._report(found, whole)

    def _asking(self, steps: dict[str, Step], whole: float) -> Callable[[str], Step]:
        from ci.bisect import Outcome, Step, step_of
        from flexq_bench.errors import InfrastructureError

        def ask(commit: str) -> Step:
            try:
                compared = self._compare(commit)
            except InfrastructureError as error:
                step = Step(commit, Outcome.SKIPPED, str(error))
            except UsageError as error:  # a commit that has no worker
                step = Step(commit, Outcome.SKIPPED, str(error))
            else:
                step = step_of(commit, compared.confirmation, whole, compared.detail)
            steps[commit] = step
            self.journal.write(steps)
            self._say_step(step)
            return step

        return ask

    def _compare(self, commit: str) -> CaseComparison:
        from flexq_bench.measure.ab import compare_commits

        with progress(self.rules.blocks_at_first) as on_block:
            (found,) = compare_commits(
                self.repository,
                self.good,
                commit,
                [self.case],
                device=self.device,
                seed=self.seed,
                rules=self.rules,
                on_block=on_block,
            )
        return found

    def _report(self, found: Found, whole: float) -> int:
        from flexq_bench.measure.ab.revisions import subject_of

        single = len(found.suspects) == 1
        code = ExitCode.AMBIGUOUS
        if single:
            code = ExitCode.REGRESSION if whole > 0 else ExitCode.PASS
        if self.as_json:
            print_json(
                {
                    "case": self.case.key,
                    "good": self.good,
                    "bad": self.commits[-1],
                    "relative_change": math.expm1(whole),
                    "suspects": found.suspects,
                    "last_unchanged": found.last_unchanged,
                    "steps": plain(list(found.steps.values())),
                    "exit_code": int(code),
                }
            )
            return int(code)
        word = "slower" if whole > 0 else "faster"
        if single:
            self._say(f"the commit that made it {word}:")
        else:
            self._say(f"one of these made it {word}; those between could not be judged:")
        for suspect in found.suspects:
            self._say(f"  {suspect[:10]} {subject_of(self.repository, suspect)}")
        return int(code)

    def _say_ends(self, found: CaseComparison, code: ExitCode) -> None:
        from flexq_bench.runs.comparison_report import as_plain

        if self.as_json:
            print_json({**as_plain(found), "suspects": [], "exit_code": int(code)})
            return
        reason = found.detail or found.confirmation.reason
        self._say(f"nothing to search: bad against good is {found.confirmation.verdict} ({reason})")

    def _say_step(self, step: Step) -> None:
        self._say(f"{step.commit[:10]} {step.outcome}: {step.reason}")

    def _say(self, text: str) -> None:
        say(console(stderr=self.as_json), text)


def _ends(found: CaseComparison) -> ExitCode | None:
    """The exit code where there is nothing to search between good and bad; None: there is."""
    from flexq_bench.verdicts import Verdict

    verdict = found.confirmation.verdict
    if verdict in (Verdict.SLOWER, Verdict.FASTER):
        return None
    ends = {
        Verdict.SAME: ExitCode.PASS,
        Verdict.AMBIGUOUS: ExitCode.AMBIGUOUS,
        Verdict.INCORRECT: ExitCode.REGRESSION,
    }
    return ends.get(verdict, ExitCode.MISSING)


def _case_of(series: str, db: str | None) -> tuple[Case, str | None]:
    """The case of a stored series and its GPU, or of a key typed (any GPU)."""
    from db import queries
    from db.engine import open_database
    from workloads.case import Case
    from workloads.gemm import GemmWorkload

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


def _check_device(device: str, gpu: str | None) -> str:
    """What tells this device from others. Raises UsageError if it is not the series' kind."""
    from flexq_bench.measure.device import describe_device, find_device

    found = describe_device(find_device(device), None)
    if gpu is not None and found.sku != gpu:
        raise UsageError(
            f"the series is of {gpu} and {device} is {found.sku}: bisect where such a one is"
        )
    return found.uuid
