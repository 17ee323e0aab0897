"""Results of gates and nightly runs, which reports and notifications show."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from flexq_bench.ci.policy import Waiver
from flexq_bench.db.records import CommitInfo
from flexq_bench.exit_codes import ExitCode
from flexq_bench.verdicts import Verdict
from flexq_bench.workloads.case import Case

MAX_CANDIDATES = 50  # comparisons of outliers per night and kind of GPU, and as many of others


class GateOutcome(StrEnum):
    """GateOutcome of a case or a limit under the policy, the worst first."""

    MISSING = "missing"  # planned, but without a result to judge
    REGRESSION = "regression"
    FAIL = "fail"  # of the accuracy gate: a limit is exceeded, or a model is broken
    NOT_JUDGED = "not judged"  # of the accuracy gate: for a reason that the report gives
    AMBIGUOUS = "ambiguous"
    WAIVED = "waived"
    PASS = "pass"
    SAME_CODE = "same code"  # passes without a measurement: both commits have the same code
    PROBE = "probe"  # a baseline of other cases, not judged itself


_EXIT_CODES = {
    GateOutcome.MISSING: ExitCode.MISSING,
    GateOutcome.REGRESSION: ExitCode.REGRESSION,
    GateOutcome.FAIL: ExitCode.REGRESSION,
    GateOutcome.NOT_JUDGED: ExitCode.MISSING,
    GateOutcome.AMBIGUOUS: ExitCode.AMBIGUOUS,
}


def exit_code_of(outcomes: Iterable[GateOutcome]) -> ExitCode:
    """Return the exit code of the worst outcome; missing results are worst."""
    present = set(outcomes)
    return next(
        (code for outcome, code in _EXIT_CODES.items() if outcome in present), ExitCode.PASS
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a planned case. Changes in percent of the base's time, positive is slower.

    change, low, high None: nothing was judged. pairs: of processes (of placements, if
    there are fewer than 5 processes) that were judged. stopped_early: True if the change was so
    clear that fewer pairs than usual decided it. waiver: the one that applies if it is `waived`.
    pairs_needed: estimated pairs that would decide an ambiguous case; None: not known. need: what
    would, in words; empty: not known, or it is not ambiguous.
    """

    case: Case
    outcome: GateOutcome
    verdict: str
    cause: str
    reason: str
    change: float | None
    low: float | None
    high: float | None
    limit: float
    owner: str
    pairs: int
    stopped_early: bool
    waiver: Waiver | None = None
    pairs_needed: int | None = None
    need: str = ""


@dataclass(frozen=True, slots=True)
class GateReport:
    """Result of a performance gate. notes: remarks on the comparison and on the policy.

    opened: ids of new alerts. trusts_head: True if head was measured with its own program.
    """

    base: CommitInfo
    head: CommitInfo
    gpu: str
    policy: str
    suite: str
    findings: tuple[Finding, ...]  # in the plan's order
    notes: tuple[str, ...]
    opened: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()
    trusts_head: bool = False

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the worst outcome."""
        return exit_code_of(finding.outcome for finding in self.findings)

    @property
    def compared(self) -> int:
        """Number of cases that were measured and have a verdict."""
        return sum(
            finding.verdict != Verdict.NO_DATA and finding.outcome is not GateOutcome.SAME_CODE
            for finding in self.findings
        )

    def with_outcome(self, outcome: GateOutcome) -> tuple[Finding, ...]:
        """Return the findings of one outcome, slowest first."""
        findings = [finding for finding in self.findings if finding.outcome is outcome]
        return tuple(sorted(findings, key=_slowness, reverse=True))


def _slowness(finding: Finding) -> float:
    # Incorrect results sort before slow ones.
    if finding.verdict == Verdict.INCORRECT:
        return math.inf
    return -math.inf if finding.change is None else finding.change


class NightOutcome(StrEnum):
    """Outcome of a night on one kind of GPU."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"  # planned results or comparisons are missing
    ABSENT = "absent"  # no such GPU was available
    REFUSED = "refused"  # its workers were refused


@dataclass(frozen=True, slots=True)
class KindReport:
    """Result of a night on one kind of GPU.

    outcome: a NightOutcome. reasons: number of cases that are missing or failed, by reason.
    candidates: outliers and creeping series. verdicts: number of comparisons by verdict. notes:
    steps that were skipped, and why. worse: a line for each case that the code made slower or
    wrong, worst first. change_points, retracted: change points that the retrospective pass stored
    and retracted, over all series. budget: most comparisons of outliers. not_compared: outliers
    beyond the budget, most suspicious first: case, nights waited, distance from its history in
    sigmas. comparisons: number of cases to compare. uncompared: those without a result: case,
    commit to compare with, reason.
    """

    night: str
    suite: str
    gpu: str
    commit: str
    run: str  # uuid
    planned: int
    received: int
    statuses: dict[str, int]
    reasons: dict[str, int]
    candidates: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    opened: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()
    canaries: int = 0
    change_points: int = 0
    notes: tuple[str, ...] = ()
    worse: tuple[str, ...] = ()
    retracted: int = 0
    changed: tuple[str, ...] = ()  # alerts that moved or ended, with the reasons
    budget: int = MAX_CANDIDATES
    not_compared: tuple[tuple[str, int, float], ...] = ()
    outcome: str = "complete"
    comparisons: int = 0
    uncompared: tuple[tuple[str, str, str], ...] = ()
