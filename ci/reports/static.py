"""Reports of the static gate: every regression, and a summary of all other changes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.table import Table

from flexq_bench.ci.gate_static import Change, StaticReport
from flexq_bench.ci.reports.formats import escaped
from flexq_bench.measure.machine_code.comparison import Broken, short_name

_MAX_ROWS = 30  # regressions, and builds that don't compile, that are listed
_MAX_ERROR_LENGTH = 200  # characters of a compiler error


@dataclass(frozen=True, slots=True)
class Summary:
    """Changes of one metric over the builds of one source. lowest, highest: head minus base."""

    source: str
    metric: str
    verdict: str
    count: int
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Regression:
    """A metric that got worse in one function of one build, on one or more targets."""

    build: str
    function: str
    metric: str
    changes: tuple[Change, ...]

    @property
    def targets(self) -> str:
        return ", ".join(change.function.target for change in self.changes)


def regressions(changes: Sequence[Change]) -> list[Regression]:
    """Group the changes that are worse by build, function and metric."""
    groups: dict[tuple[str, str, str], list[Change]] = defaultdict(list)
    for change in changes:
        if change.verdict == "worse":
            function = change.function
            groups[function.build, function.name, change.metric.name].append(change)
    return [Regression(*key, tuple(group)) for key, group in sorted(groups.items())]


def summarize(changes: Sequence[Change]) -> list[Summary]:
    """Summarize changes by source, metric and verdict."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for change in changes:
        key = (change.function.build.split()[0], change.metric.name, change.verdict)
        groups[key].append(change.head - (change.base or 0))
    return [
        Summary(*key, len(deltas), min(deltas), max(deltas))
        for key, deltas in sorted(groups.items())
    ]


def headline(report: StaticReport) -> str:
    """Return the verdict in one line."""
    revisions = f"{short_name(report.head)} against {short_name(report.base)}"
    if report.broken:
        return f"{revisions}: does not compile for {_count(len(report.broken), 'build')}"
    worse = regressions(report.changes)
    if worse:
        return f"{revisions}: {_count(len(worse), 'regression')} of the machine code"
    return f"{revisions}: no regression of the machine code"


def coverage(report: StaticReport) -> str:
    """Return the numbers of compared builds in one line."""
    parts = (
        f"{report.same_source} of unchanged sources",
        f"{report.same_code} with the same machine code",
        f"{report.differing} that differ",
        f"{report.added} added",
        f"{report.removed} removed",
    )
    return f"builds for {', '.join(report.targets)}: {', '.join(parts)}"


def terminal(report: StaticReport) -> Table | None:
    """Return a table of regressions; None: there are none."""
    worse = regressions(report.changes)
    if not worse:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in _COLUMNS:
        table.add_column(name, justify="right" if justify else "left", overflow="fold")
    for regression in worse[:_MAX_ROWS]:
        table.add_row(*_cells(report, regression))
    return table


def further_lines(report: StaticReport) -> list[str]:
    """Return the lines below the table: omitted regressions, broken builds, other changes."""
    lines = []
    if report.uncompared:
        builds = _count(report.uncompared, "build")
        lines.append(f"the base does not compile for {builds}: only spills are judged there")
    left_out = len(regressions(report.changes)) - _MAX_ROWS
    if left_out > 0:
        lines.append(f"and {left_out} more regressions: --json has them")
    lines += [_broken_line(broken) for broken in report.broken[:_MAX_ROWS]]
    if len(report.broken) > _MAX_ROWS:
        lines.append(
            f"and {len(report.broken) - _MAX_ROWS} more that do not compile: --json has them"
        )
    return lines + [_summary_line(s) for s in summarize(report.changes) if s.verdict != "worse"]


def markdown(report: StaticReport) -> str:
    """Format a pull request comment; its first line is constant, so that it can be updated."""
    lines = [
        "## Static gate",
        "",
        f"**{escaped(headline(report))}**",
        "",
        escaped(coverage(report)),
    ]
    worse = regressions(report.changes)
    if worse:
        names = [name for name, _ in _COLUMNS]
        rules = ["---:" if right else "---" for _, right in _COLUMNS]
        cells = (map(escaped, _cells(report, regression)) for regression in worse[:_MAX_ROWS])
        rows = [names, rules, *cells]
        lines += ["", *(f"| {' | '.join(row)} |" for row in rows)]
    if further := further_lines(report):
        lines += ["", *(f"- {escaped(line)}" for line in further)]
    return "\n".join(lines) + "\n"


def as_json(report: StaticReport) -> str:
    """Format one object with the verdict, the counts and every change."""
    values = asdict(report)
    del values["differences"]  # included in the changes, with their verdicts
    result = {"verdict": headline(report), "exit_code": int(report.exit_code)}
    return json.dumps(values | result, indent=2, ensure_ascii=False) + "\n"


_COLUMNS = (
    ("kernels", False),
    ("build", False),
    ("function", False),
    ("targets", False),
    ("metric", False),
    ("base", True),
    ("head", True),
)


def _cells(report: StaticReport, regression: Regression) -> tuple[str, ...]:
    labels = report.kernels[regression.build]
    shown = ", ".join(labels[:2]) + (f" and {len(labels) - 2} more" if len(labels) > 2 else "")
    bases = [change.base for change in regression.changes]
    base = "new" if None in bases else _range([b for b in bases if b is not None])
    head = _range([change.head for change in regression.changes])
    named = (shown, regression.build, regression.function, regression.targets, regression.metric)
    return (*named, base, head)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):g}", f"{max(values):g}"
    return low if low == high else f"{low} to {high}"


def _broken_line(broken: Broken) -> str:
    error = broken.error
    if len(error) > _MAX_ERROR_LENGTH:
        error = f"{error[: _MAX_ERROR_LENGTH - 3]}..."
    return f"{broken.build} for {broken.target}: {error}"


def _summary_line(summary: Summary) -> str:
    low, high = f"{summary.lowest:+g}", f"{summary.highest:+g}"
    by = low if low == high else f"{low} to {high}"
    word = "better" if summary.verdict == "better" else "changed"
    functions = _count(summary.count, "function")
    return f"{summary.source}: {summary.metric} {word} in {functions}, by {by}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
