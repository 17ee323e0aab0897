"""The static gate: judge differences of two revisions' machine code by limits. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from flexq_bench.errors import MissingResultsError, UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.kernels.runtime.occupancy import TARGETS
from flexq_bench.measure.machine_code.comparison import (
    OnProgress,
    RevisionComparison,
    compare_revisions,
)
from flexq_bench.measure.machine_code.metrics import (
    INSTRUCTIONS,
    LOCAL_BYTES,
    SPILL_BYTES,
    WARPS_PER_SM,
    Difference,
    Metric,
)
from flexq_bench.measure.machine_code.projects import compare_project_code
from flexq_bench.repository.project import Project, ProjectRevision
from flexq_bench.workloads.names import unknown

Verdict = Literal["worse", "better", "changed"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest accepted degradation, in percent of the base.

    occupancy_loss: of the resident warps of an SM; 0: none may be lost. instruction_growth: of each
    kind of instruction; None: growth is reported, but never a regression.
    """

    occupancy_loss: float = 0.0
    instruction_growth: float | None = None


@dataclass(frozen=True, slots=True)
class Change(Difference):
    """A difference with its verdict."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class StaticReport(RevisionComparison):
    """A comparison of two revisions with the verdict of each difference."""

    changes: tuple[Change, ...]

    @property
    def is_regression(self) -> bool:
        """True if any difference is worse."""
        return any(change.verdict == "worse" for change in self.changes)

    @property
    def exit_code(self) -> ExitCode:
        """Exit code: MISSING if a build of head does not compile, even with regressions."""
        if self.broken:
            return ExitCode.MISSING
        return ExitCode.REGRESSION if self.is_regression else ExitCode.PASS


def gate_static(
    repository: Path,
    base: str,
    head: str,
    *,
    patterns: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    limits: Limits | None = None,
    on_progress: OnProgress = lambda _done, _all: None,
) -> StaticReport:
    """Compile the builds that differ between two revisions and judge every difference.

    targets: architectures; None: all supported ones. Other arguments and errors: as
    `compare_revisions`. Raises UsageError for an unknown target.
    """
    compared = compare_revisions(
        repository,
        base,
        head,
        patterns=patterns,
        targets=_checked_targets(targets),
        on_progress=on_progress,
    )
    return _judged(compared, limits or Limits())


def gate_static_project(
    project: Project,
    base: ProjectRevision,
    head: ProjectRevision,
    *,
    patterns: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    limits: Limits | None = None,
    on_progress: OnProgress = lambda _done, _all: None,
) -> StaticReport:
    """Run gate_static on commits of another repository; errors as `compare_project_code`.

    Raises MissingResultsError if no kernel of head provides its machine code.
    """
    compared = compare_project_code(
        project,
        base,
        head,
        patterns=patterns,
        targets=_checked_targets(targets),
        on_progress=on_progress,
    )
    if not compared.kernels:
        raise MissingResultsError(
            f"no kernel of {head.commit.sha[:10]} provides its machine code: give linear_kernel a "
            "machine_code"
        )
    return _judged(compared, limits or Limits())


def _judged(compared: RevisionComparison, bounds: Limits) -> StaticReport:
    return StaticReport(
        **{field.name: getattr(compared, field.name) for field in fields(compared)},
        changes=tuple(judge(difference, bounds) for difference in compared.differences),
    )


def judge(difference: Difference, limits: Limits) -> Change:
    """Return the difference with its verdict.

    More spilled bytes are worse, and so are fewer warps per SM beyond `limits`. More registers and
    shared memory are only `changed`: what they cost shows in the warps per SM.
    """
    metric, base, head = difference.metric, difference.base, difference.head
    verdict = "worse" if base is None else _verdict(metric, base, head, limits)
    return Change(difference.function, metric, base, head, verdict)


def _verdict(metric: Metric, base: float, head: float, limits: Limits) -> Verdict:
    if metric in (SPILL_BYTES, LOCAL_BYTES):
        return "worse" if head > base else "better"
    if metric == WARPS_PER_SM:
        if head > base:
            return "better"
        # A function of which no block fits is worse whatever the limit.
        lost = head == 0 or head < base * (1 - limits.occupancy_loss / 100)
        return "worse" if lost else "changed"
    growth = limits.instruction_growth
    if metric in INSTRUCTIONS and growth is not None and head > base * (1 + growth / 100):
        return "worse"
    return "changed"


def _checked_targets(targets: Sequence[str] | None) -> tuple[str, ...]:
    if targets is None:
        return TARGETS
    for target in targets:
        if target not in TARGETS:
            raise UsageError(unknown("target", target, TARGETS))
    return tuple(target for target in TARGETS if target in targets)
