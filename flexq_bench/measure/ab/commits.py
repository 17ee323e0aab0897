"""Interleaved A/B measurement of two commits, each from its own worktree in its own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Unpack

from flexq_bench.measure.ab.course import compare_cases
from flexq_bench.measure.ab.experiment import ABExperiment, Options, Side
from flexq_bench.measure.ab.revisions import Revision, resolve_pair
from flexq_bench.measure.device import find_device
from flexq_bench.measure.external_kernels import sandbox_of_adopted
from flexq_bench.measure.launcher import OWN_LIBRARIES, Launcher, forking_launcher
from flexq_bench.repository.worktrees import repository_of, worktree
from flexq_bench.verdicts import CaseComparison
from flexq_bench.workloads.case import Case


def compare_commits(
    repository: Path,
    base: str,
    head: str,
    cases: Sequence[Case],
    *,
    launcher: Launcher | None = None,
    **options: Unpack[Options],
) -> Iterator[CaseComparison]:
    """Yield one result per case; cases decided at the first look come first.

    base, head: revisions, `.` for the working tree. launcher: starts the workers of both sides, so
    that several comparisons can share one; None: one for each side. options: see ABExperiment.
    Every case gets a result, even if it could not be measured. The caller judges them together (see
    `confirm_comparisons`). Raises UsageError if the revisions can't be compared,
    BrokenRevisionError if head's worker does not start, InfrastructureError if base's doesn't or
    git fails.
    """
    repository = repository_of(repository)
    revisions = resolve_pair(repository, base, head)
    yield from compare_revisions(repository, revisions, cases, launcher=launcher, **options)


def compare_revisions(
    repository: Path,
    revisions: tuple[Revision, Revision],
    cases: Sequence[Case],
    *,
    launcher: Launcher | None = None,
    **options: Unpack[Options],
) -> Iterator[CaseComparison]:
    """Compare base and head, whose commits a repository has; see compare_commits."""
    find_device(options.get("device", "cuda"))
    base, head = revisions
    with ExitStack() as stack:
        sides: dict[str, Side] = {}  # one of a commit that is compared with itself
        for each in {base.name: base, head.name: head}.values():
            tree = stack.enter_context(worktree(repository, each.commit))
            if launcher is not None:
                sides[each.name] = Side(each.name, tree, launcher=launcher)
                continue
            sandbox = sandbox_of_adopted(tree)
            own = stack.enter_context(forking_launcher(tree, sandbox.wrap, libraries=OWN_LIBRARIES))
            sides[each.name] = Side(each.name, tree, launcher=own, sandbox=sandbox)
        yield from compare_trees(sides[base.name], sides[head.name], cases, **options)


def compare_trees(
    base: Side,
    head: Side,
    cases: Sequence[Case],
    **options: Unpack[Options],
) -> Iterator[CaseComparison]:
    """Compare two source folders that already exist; see compare_commits."""
    experiment = ABExperiment(base, head, **options)
    yield from compare_cases([(experiment, [(case, case) for case in cases])])
