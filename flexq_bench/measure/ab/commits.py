"""Interleaved A/B measurement of two commits, each from its own worktree in its own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from flexq_bench.measure.ab.case_comparison import (
    CaseComparison,
    InterleaveRules,
    OnBlock,
    OnResult,
)
from flexq_bench.measure.ab.experiment import ABExperiment, Side
from flexq_bench.measure.ab.revisions import resolve_pair
from flexq_bench.measure.device import find_device
from flexq_bench.repository.worktrees import repository_of, worktree
from flexq_bench.workloads.case import Case

_DEFAULT_RULES = InterleaveRules()


def compare_commits(
    repository: Path,
    base: str,
    head: str,
    cases: Sequence[Case],
    *,
    device: str = "cuda",
    seed: int = 0,
    rules: InterleaveRules = _DEFAULT_RULES,
    on_result: OnResult | None = None,
    on_block: OnBlock | None = None,
    command: Sequence[str] | None = None,
) -> Iterator[CaseComparison]:
    """Yield one result per case; cases decided at the first look come first.

    base, head: revisions, `.` for the working tree. on_result, on_block: called with each result
    and each block as it comes. command: of a worker, without its options; None: that of each tree.
    Every case gets a result, even if it could not be measured. The caller judges them together (see
    `confirm_comparisons`). Raises UsageError if the revisions can't be compared,
    BrokenRevisionError if head's worker does not start, InfrastructureError if base's doesn't or
    git fails.
    """
    find_device(device)
    repository = repository_of(repository)
    revisions = resolve_pair(repository, base, head)
    with ExitStack() as stack:
        first, second = (
            Side(revision.name, stack.enter_context(worktree(repository, revision.commit)))
            for revision in revisions
        )
        yield from compare_trees(
            first,
            second,
            cases,
            device=device,
            seed=seed,
            rules=rules,
            on_result=on_result,
            on_block=on_block,
            command=command,
        )


def compare_trees(
    base: Side,
    head: Side,
    cases: Sequence[Case],
    *,
    device: str = "cuda",
    seed: int = 0,
    rules: InterleaveRules = _DEFAULT_RULES,
    on_result: OnResult | None = None,
    on_block: OnBlock | None = None,
    command: Sequence[str] | None = None,
) -> Iterator[CaseComparison]:
    """Compare two source folders that already exist; see compare_commits."""
    experiment = ABExperiment(
        base,
        head,
        rules,
        device,
        seed,
        command=command,
        on_result=on_result,
        on_block=on_block,
    )
    yield from experiment.compare([(case, case) for case in cases])
