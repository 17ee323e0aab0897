"""Reports of the performance gate: one line, terminal table, Markdown, JUnit XML, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from flexq_bench.ci.report_data import Finding, GateOutcome, GateReport
from flexq_bench.ci.reports.formats import JUnitCase, junit_xml, plain
from flexq_bench.exit_codes import ExitCode
from flexq_bench.verdicts import Cause, Verdict
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import describe, format_values

SCHEMA_VERSION = 1
# An HTML comment by which the next run finds the comment to replace.
MARKER = "<!-- flexq-bench gate perf -->"
SUITE = "flexq-bench gate perf"
EXIT_WORDS = {
    ExitCode.PASS: "passed",
    ExitCode.REGRESSION: "failed",
    ExitCode.AMBIGUOUS: "undecided",
    ExitCode.MISSING: "incomplete",
}
_STOPPED_EARLY = "clear, so stopped early"
_TRUSTED_HEAD = "head was measured with its own program (--trust-head)"
_SHA = 10
# GitHub limits a comment to 65,536 characters.
_MAX_ROWS = 30  # per table or list
_FAILING = (GateOutcome.MISSING, GateOutcome.REGRESSION, GateOutcome.AMBIGUOUS)
_JUNIT_TAGS = {
    GateOutcome.MISSING: "error",
    GateOutcome.REGRESSION: "failure",
    GateOutcome.AMBIGUOUS: "failure",
    GateOutcome.WAIVED: "skipped",
}


def headline(report: GateReport) -> str:
    """Return a line like `failed: 2 regressions, 58 pass; 60 of 60 cases compared`."""
    counts = []
    for outcome in GateOutcome:
        count = len(report.with_outcome(outcome))
        if count:
            countable = outcome in (GateOutcome.REGRESSION, GateOutcome.PROBE)
            plural = "s" if countable and count > 1 else ""
            counts.append(f"{count} {outcome}{plural}")
    compared = f"{report.compared} of {len(report.findings)} cases compared"
    line = f"{EXIT_WORDS[report.exit_code]}: {', '.join(counts) or 'nothing planned'}; {compared}"
    return f"{line}; {_TRUSTED_HEAD}" if report.trusts_head else line


def findings_table(report: GateReport) -> Table | None:
    """Return a table of the cases that changed or failed, worst first; None: there are none."""
    shown = [
        finding
        for outcome in GateOutcome
        for finding in report.with_outcome(outcome)
        if outcome not in (GateOutcome.PASS, GateOutcome.SAME_CODE) or finding.verdict != "same"
    ]
    if not shown:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("outcome", "case", "change", "limit", "pairs", "owner", "why"):
        right = name in ("change", "limit", "pairs")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for finding in shown:
        reason = finding.verdict if finding.change is not None else finding.reason
        if finding.need and finding.change is not None:
            reason = f"{reason}: {finding.need}"
        if finding.stopped_early:
            reason = f"{reason}: {_STOPPED_EARLY}"
        why = reason if finding.waiver is None else f"{reason}: {finding.waiver.reason}"
        table.add_row(
            str(finding.outcome),
            finding.case.key,
            _change(finding),
            f"{finding.limit:g} %",
            str(finding.pairs),
            finding.owner,
            why,
        )
    return table


def markdown(report: GateReport) -> str:
    """Format a pull request comment: failures visible, all else collapsed, texts escaped."""
    return "\n".join(_lines(report)) + "\n"


def junit(report: GateReport) -> str:
    """Format a report: regressions and ambiguous cases fail, missing are errors, waived skipped."""
    counts = {outcome: len(report.with_outcome(outcome)) for outcome in GateOutcome}
    totals = {
        "tests": len(report.findings),
        "failures": counts[GateOutcome.REGRESSION] + counts[GateOutcome.AMBIGUOUS],
        "errors": counts[GateOutcome.MISSING],
        "skipped": counts[GateOutcome.WAIVED],
    }
    properties = (("between", _between(report)), ("policy", report.policy))
    return junit_xml(SUITE, totals, properties, map(_junit_case, report.findings))


def as_json(report: GateReport) -> str:
    """Format a report as one object, with every case in the plan's order; changes in percent."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "gate": "perf",
        "exit_code": int(report.exit_code),
        "headline": headline(report),
        "base": report.base.sha,
        "head": report.head.sha,
        "gpu": report.gpu,
        "suite": report.suite,
        "policy": report.policy,
        "trusts_head": report.trusts_head,
        "notes": list(report.notes),
        "alerts": {
            "opened": list(report.opened),
            "joined": list(report.joined),
            "fixed": list(report.fixed),
        },
        "cases": [_case(finding) for finding in report.findings],
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _between(report: GateReport) -> str:
    """Return the commits and the GPU, as `abcdef1234 -> 1234abcdef on NVIDIA H200`."""
    return f"{report.base.sha[:_SHA]} -> {report.head.sha[:_SHA]} on {report.gpu}"


def _change(finding: Finding) -> str:
    """Format the change, as `+3.1 % (+2.5 … +3.7 %)`; empty: nothing was judged."""
    if finding.change is None or finding.low is None or finding.high is None:
        return ""
    return f"{finding.change:+.2f} % ({finding.low:+.2f} … {finding.high:+.2f} %)"


def _shape(finding: Finding) -> str:
    """Format the shape as MxNxK, or the operation's parameters."""
    workload = finding.case.workload
    if isinstance(workload, GemmWorkload):
        return f"{workload.m}x{workload.n}x{workload.k}"
    return describe(workload.operation, format_values(workload.values, " "))


def _lines(report: GateReport) -> Iterator[str]:
    yield MARKER
    yield f"### Performance gate {plain(headline(report))}"
    yield ""
    yield (
        f"{plain(_between(report))}, suite {plain(report.suite)}, policy {plain(report.policy)}. "
        "Bounds are one-sided, 99 %, from interleaved runs on one device."
    )
    failing = [finding for outcome in _FAILING for finding in report.with_outcome(outcome)]
    if failing:
        yield ""
        yield from _table(failing)
    waived = report.with_outcome(GateOutcome.WAIVED)
    if waived:
        yield from _collapsed(f"{len(waived)} waived", _waivers(waived))
    passed = report.with_outcome(GateOutcome.PASS)
    faster = [f for f in passed if f.verdict == Verdict.FASTER][::-1]
    if faster:
        yield from _collapsed(f"{len(faster)} faster", _table(faster))
    slower = [f for f in passed if f.verdict == Verdict.SLOWER]
    if slower:
        yield from _collapsed(f"{len(slower)} slower, and accepted", _table(slower))
    probes = [f for f in report.with_outcome(GateOutcome.PROBE) if f.verdict != Verdict.SAME]
    if probes:
        plural = "s" if len(probes) > 1 else ""
        title = f"{len(probes)} probe{plural}, baselines of other cases, may have changed"
        yield from _collapsed(title, _table(probes))
    if report.notes:
        yield ""
        yield from (f"- {plain(note)}" for note in report.notes[:_MAX_ROWS])
        yield from _omitted(len(report.notes))


def _table(findings: Sequence[Finding]) -> Iterator[str]:
    yield "| kernel | stage | M x N x K | change | limit | pairs | outcome | owner | |"
    yield "| --- | --- | --- | ---: | ---: | ---: | --- | --- | --- |"
    for finding in findings[:_MAX_ROWS]:
        cells = (
            f"`{finding.case.label}`",
            f"{finding.case.stage} {finding.case.cache}",
            _shape(finding),
            _change(finding),
            f"{finding.limit:g} %",
            str(finding.pairs),
            f"**{finding.outcome}**" if finding.outcome in _FAILING else finding.verdict,
            plain(finding.owner),
            plain(_reason(finding)),
        )
        yield f"| {' | '.join(cells)} |"
    yield from _omitted(len(findings))


def _reason(finding: Finding) -> str:
    """Return the reason or cause that a row's numbers do not show; empty: there is none."""
    if finding.change is None:
        return finding.reason
    if finding.need:
        return finding.need
    if finding.cause in (Cause.NONE, Cause.CODE):
        return _STOPPED_EARLY if finding.stopped_early else ""
    detail = finding.reason.partition("; ")[2]
    return detail or f"cause: {finding.cause}"


def _waivers(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings[:_MAX_ROWS]:
        waiver = finding.waiver
        if waiver is not None:
            result = _change(finding) or finding.verdict
            by = f"{waiver.reason} ({waiver.owner}, until {waiver.expires})"
            yield f"- `{finding.case.key}` {result}: {plain(by)}"
    yield from _omitted(len(findings))


def _omitted(count: int) -> Iterator[str]:
    if count > _MAX_ROWS:
        yield ""
        yield f"and {count - _MAX_ROWS} more: see the JSON report."


def _collapsed(title: str, lines: Iterator[str]) -> Iterator[str]:
    yield ""
    yield f"<details><summary>{title}</summary>"
    yield ""
    yield from lines
    yield ""
    yield "</details>"


def _junit_case(finding: Finding) -> JUnitCase:
    tag = _JUNIT_TAGS.get(finding.outcome, "")
    waiver = finding.waiver
    if waiver is None:
        message = f"{finding.verdict} {_change(finding)}, limit {finding.limit:g} %"
    else:
        message = f"waived until {waiver.expires} by {waiver.owner}: {waiver.reason}"
    return JUnitCase(
        finding.case.label,
        finding.case.key,
        tag,
        message,
        kind="" if tag == "skipped" else str(finding.outcome),
        detail=f"{finding.reason} (owner: {finding.owner or 'nobody'})",
    )


def _case(finding: Finding) -> dict[str, object]:
    case, waiver = finding.case, finding.waiver
    return {
        "case": case.key,
        "kernel": case.label,
        "model": case.model,
        "layer": case.layer,
        "outcome": str(finding.outcome),
        "verdict": finding.verdict,
        "cause": finding.cause,
        "reason": finding.reason,
        "change_percent": finding.change,
        "low_percent": finding.low,
        "high_percent": finding.high,
        "limit_percent": finding.limit,
        "owner": finding.owner,
        "pairs": finding.pairs,
        "pairs_needed": finding.pairs_needed,
        "stopped_early": finding.stopped_early,
        "waiver": None
        if waiver is None
        else {
            "name": waiver.name,
            "reason": waiver.reason,
            "owner": waiver.owner,
            "expires": waiver.expires.isoformat(),
        },
    }
