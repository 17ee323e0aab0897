"""Reports of a bisection: lines for a terminal, values for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ci.bisect import BisectReport, Step
from flexq_bench.measure.ab.revisions import subject_of
from flexq_bench.runs.comparison_report import as_plain as comparison_as_plain

_SHA = 10


def step_line(step: Step) -> str:
    """Format a step, as `abcdef1234 changed: 4 % slower`."""
    return f"{step.commit[:_SHA]} {step.outcome}: {step.reason}"


def lines(report: BisectReport, repository: Path) -> Iterator[str]:
    """Yield the suspects with their commits' subjects, or the reason why nothing was searched."""
    if report.location is None or report.change is None:
        if report.ends is not None:
            confirmed = report.ends.confirmation
            reason = report.ends.detail or confirmed.reason
            yield f"nothing to search: bad against good is {confirmed.verdict} ({reason})"
        return
    word = "slower" if report.change > 0 else "faster"
    if len(report.location.suspects) == 1:
        yield f"the commit that made it {word}:"
    else:
        yield f"one of these made it {word}; those between could not be judged:"
    for suspect in report.location.suspects:
        yield f"  {suspect[:_SHA]} {subject_of(repository, suspect)}"


def line(report: BisectReport) -> str:
    """Format the result in one line, as `abcdef1234 made it 4.1 % slower`."""
    if report.location is None or report.change is None:
        return "; ".join(lines(report, Path()))
    size = f"{100 * abs(math.expm1(report.change)):.1f} %"
    word = f"{size} {'slower' if report.change > 0 else 'faster'}"
    first, *others = (suspect[:_SHA] for suspect in report.location.suspects)
    if not others:
        return f"{first} made it {word}"
    return (
        f"one of {len(others) + 1} commits, {first} to {others[-1]}, made it {word}: those before "
        "the last could not be judged"
    )


def as_plain(report: BisectReport) -> dict[str, Any]:
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
        "steps": [asdict(step) for step in report.location.steps.values()],
        "exit_code": code,
    }
