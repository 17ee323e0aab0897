"""Reports of a bisection: lines for a terminal, values for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexq_bench.ci.bisect import BisectionStep, BisectReport
from flexq_bench.measure.ab.revisions import MergedBranch, merged_branches, subject_of
from flexq_bench.results.comparison_report import as_plain as comparison_as_plain
from flexq_bench.runs.command_lines import command

_SHA = 10


def step_line(step: BisectionStep) -> str:
    """Format a step, as `abcdef1234 changed after 6 pairs: 4 % slower`."""
    after = f" after {step.pairs} pairs" if step.pairs else ""
    return f"{step.commit[:_SHA]} {step.outcome}{after}: {step.reason}"


def merged(report: BisectReport, repository: Path) -> list[MergedBranch]:
    """Branches to search next if the only suspect is a merge, whose commits were not searched."""
    if report.location is None or len(report.location.suspects) > 1:
        return []
    (suspect,) = report.location.suspects
    return merged_branches(repository, suspect, report.location.last_unchanged)


def lines(report: BisectReport, repository: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """Yield the suspects with their commits' subjects, or the reason why nothing was searched.

    A suspect that is a merge is followed by a command that searches the merged commits, with
    `options`.
    """
    if report.location is None or report.change is None:
        if report.ends is not None:
            confirmed = report.ends.confirmation
            reason = report.ends.detail or confirmed.reason
            yield f"nothing to search: bad against good is {confirmed.verdict} ({reason})"
        return
    direction = "slower" if report.change > 0 else "faster"
    if len(report.location.suspects) == 1:
        yield f"the commit that made it {direction}:"
    else:
        yield f"one of these made it {direction}; those between could not be judged:"
    for suspect in report.location.suspects:
        yield f"  {suspect[:_SHA]} {subject_of(repository, suspect)}"
    branches = merged(report, repository)
    for branch in branches:
        count = f"{branch.commits} commit{'s' if branch.commits > 1 else ''}"
        ends = ("--good", branch.good[:_SHA], "--bad", branch.bad[:_SHA])
        again = command("bisect", report.case.key, *ends, *options)
        yield f"it merges {count}, continue there: {again}"
    if branches:
        yield f"if nothing made it {direction} there, the merge itself did"


def line(report: BisectReport, repository: Path) -> str:
    """Format the result in one line, as `abcdef1234 made it 4.1 % slower`."""
    if report.location is None or report.change is None:
        return "; ".join(lines(report, repository))
    size = f"{100 * abs(math.expm1(report.change)):.1f} %"
    effect = f"{size} {'slower' if report.change > 0 else 'faster'}"
    first, *other_suspects = (suspect[:_SHA] for suspect in report.location.suspects)
    if not other_suspects:
        branches = merged(report, repository)
        ends = (f"--good {branch.good[:_SHA]} --bad {branch.bad[:_SHA]}" for branch in branches)
        go_on = f", a merge: continue with bisect {' and '.join(ends)}" if branches else ""
        return f"{first} made it {effect}{go_on}"
    return (
        f"one of {len(other_suspects) + 1} commits, {first} to {other_suspects[-1]}, made it "
        f"{effect}: those before the last could not be judged"
    )


def as_plain(report: BisectReport, repository: Path) -> dict[str, Any]:
    """Return values for JSON; if nothing was searched, those of the comparison of the ends."""
    code = int(report.exit_code)
    if report.location is None or report.change is None:
        ends = {} if report.ends is None else comparison_as_plain(report.ends)
        return {**ends, "suspects": [], "exit_code": code}
    return {
        "case": report.case.key,
        "good": report.good,
        "bad": report.bad,
        "relative_change": math.expm1(report.change),
        "suspects": list(report.location.suspects),
        "last_unchanged": report.location.last_unchanged,
        "merged": [asdict(branch) for branch in merged(report, repository)],
        "steps": [asdict(step) for step in report.location.steps.values()],
        "exit_code": code,
    }
