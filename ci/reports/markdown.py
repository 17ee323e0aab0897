"""Report of the performance gate as a pull request comment, which the next run replaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexq_bench.ci.gate_perf import Finding, GateReport, Outcome
from flexq_bench.ci.reports.headline import STOPPED_EARLY, between, change, headline, shape
from flexq_bench.verdicts import Cause, Verdict

# An HTML comment by which the next run finds the comment to replace.
MARKER = "<!-- flexq-bench gate perf -->"
# GitHub limits a comment to 65,536 characters.
_MOST_ROWS = 30  # per table or list
_MOST_CHARACTERS = 200  # per text
_SAFE = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {sign: f"&#{ord(sign)};" for sign in "\\`*_[]|#@!"}
)
_FAILING = (Outcome.MISSING, Outcome.REGRESSION, Outcome.AMBIGUOUS)


def markdown(report: GateReport) -> str:
    """Format a report as Markdown: failures visible, all else collapsed, texts escaped."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: GateReport) -> Iterator[str]:
    yield MARKER
    yield f"### Performance gate {plain(headline(report))}"
    yield ""
    yield (
        f"{plain(between(report))}, suite {plain(report.suite)}, policy {plain(report.policy)}. "
        "Bounds are one-sided, 99 %, from interleaved runs on one device."
    )
    failing = [finding for outcome in _FAILING for finding in report.with_outcome(outcome)]
    if failing:
        yield ""
        yield from _table(failing)
    waived = report.with_outcome(Outcome.WAIVED)
    if waived:
        yield from _collapsed(f"{len(waived)} waived", _waivers(waived))
    passed = report.with_outcome(Outcome.PASS)
    faster = [f for f in passed if f.verdict == Verdict.FASTER][::-1]
    if faster:
        yield from _collapsed(f"{len(faster)} faster", _table(faster))
    slower = [f for f in passed if f.verdict == Verdict.SLOWER]
    if slower:
        yield from _collapsed(f"{len(slower)} slower, and accepted", _table(slower))
    probes = [f for f in report.with_outcome(Outcome.PROBE) if f.verdict != Verdict.SAME]
    if probes:
        plural = "s" if len(probes) > 1 else ""
        title = f"{len(probes)} probe{plural}, baselines of other cases, may have changed"
        yield from _collapsed(title, _table(probes))
    if report.notes:
        yield ""
        yield from (f"- {plain(note)}" for note in report.notes[:_MOST_ROWS])
        yield from _omitted(len(report.notes))


def _table(findings: Sequence[Finding]) -> Iterator[str]:
    yield "| kernel | stage | M x N x K | change | limit | pairs | outcome | owner | |"
    yield "| --- | --- | --- | ---: | ---: | ---: | --- | --- | --- |"
    for finding in findings[:_MOST_ROWS]:
        cells = (
            f"`{finding.case.label}`",
            f"{finding.case.stage} {finding.case.cache}",
            shape(finding),
            change(finding),
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
    if finding.cause in (Cause.NONE, Cause.CODE):
        return STOPPED_EARLY if finding.stopped_early else ""
    detail = finding.reason.partition("; ")[2]
    return detail or f"cause: {finding.cause}"


def _waivers(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings[:_MOST_ROWS]:
        waiver = finding.waiver
        if waiver is not None:
            result = change(finding) or finding.verdict
            by = f"{waiver.reason} ({waiver.owner}, until {waiver.expires})"
            yield f"- `{finding.case.key}` {result}: {plain(by)}"
    yield from _omitted(len(findings))


def _omitted(count: int) -> Iterator[str]:
    if count > _MOST_ROWS:
        yield ""
        yield f"and {count - _MOST_ROWS} more: see the JSON report."


def _collapsed(title: str, lines: Iterator[str]) -> Iterator[str]:
    yield ""
    yield f"<details><summary>{title}</summary>"
    yield ""
    yield from lines
    yield ""
    yield "</details>"


def plain(text: str) -> str:
    """Escape Markdown and HTML, and shorten the text to one line."""
    flat = " ".join(text.split())
    if len(flat) > _MOST_CHARACTERS:
        flat = f"{flat[: _MOST_CHARACTERS - 1]}…"
    return flat.translate(_SAFE)
