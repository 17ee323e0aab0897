"""Reports of a nightly run: lines for a terminal, Markdown, JUnit XML."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from flexq_bench.ci.report_data import KindReport, NightOutcome
from flexq_bench.ci.reports.formats import JUnitCase, escaped, junit_xml

_MAX_LINES = 20  # per list and kind of GPU


def lines(reports: Sequence[KindReport]) -> Iterator[str]:
    """Yield one line per kind of GPU, followed by its changes, alerts and notes."""
    if not reports:
        yield "nothing was measured: the night was started at another commit on every kind of GPU"
    for report in reports:
        yield (
            f"{report.night} {report.gpu} at {report.commit[:10]}: {report.outcome}, "
            f"{report.received} of {report.planned} results, "
            f"{_counts(report.verdicts) or 'nothing compared'}, "
            f"{report.candidates} candidates, {report.canaries} canaries, "
            f"{report.change_points} new change points, {report.retracted} retracted"
            + (f" (run {report.run[:8]})" if report.run else "")
        )
        for line in report.worse[:_MAX_LINES]:
            yield f"  {line}"
        for number in report.opened:
            yield f"  opened alert {number}: flexq-bench explain {number}"
        yield from (f"  {line}" for line in _changed_alerts(report))
        for reason, count in _reasons(report):
            yield f"  {count} × {reason}"
        yield from (f"  {line}" for line in _uncompared(report))
        yield from (f"  {line}" for line in _budget(report))
        for note in report.notes:
            yield f"  {note}"


def markdown(reports: Sequence[KindReport]) -> str:
    """Format reports as Markdown, with a row for each kind of GPU."""
    text = ["# Night " + ", ".join(sorted({report.night for report in reports})), ""]
    text += [
        "| GPU | commit | outcome | results | compared | candidates | canaries | change points "
        "| alerts |",
        "| --- | --- | --- | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for report in reports:
        alerts = ", ".join(
            [f"opened {n}" for n in report.opened] + [f"fixed {n}" for n in report.fixed]
        )
        text.append(
            f"| {escaped(report.gpu)} | `{report.commit[:10]}` | {report.outcome} | "
            f"{report.received} / {report.planned} | {_counts(report.verdicts)} | "
            f"{report.candidates} | {report.canaries} | {report.change_points} | {alerts} |"
        )
    for report in reports:
        items = [f"- **{escaped(line)}**" for line in report.worse[:_MAX_LINES]]
        items += [f"- alert {n}: `flexq-bench explain {n}`" for n in report.opened]
        items += [f"- {escaped(line)}" for line in _changed_alerts(report)]
        items += [f"- {count} × {escaped(reason)}" for reason, count in _reasons(report)]
        items += [f"- {escaped(line)}" for line in _uncompared(report)]
        items += [f"- {escaped(line)}" for line in _budget(report)]
        items += [f"- {escaped(note)}" for note in report.notes]
        if items:
            text += ["", f"**{escaped(report.gpu)}**", "", *items]
    return "\n".join(text) + "\n"


def junit(reports: Sequence[KindReport]) -> str:
    """Format a suite with a case for each kind of GPU's results and for each bad comparison.

    Cases that became slower or wrong fail. Missing results and failed cases are errors; comparisons
    without a result are skipped.
    """
    cases = [case for report in reports for case in _junit_cases(report)]
    tags = [case.tag for case in cases]
    totals = {"tests": len(cases)} | {
        attribute: tags.count(tag)
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    }
    properties = [
        (report.gpu, f"run {report.run or 'none'} at {report.commit}") for report in reports
    ]
    return junit_xml("flexq-bench nightly", totals, properties, cases)


def _junit_cases(report: KindReport) -> Iterator[JUnitCase]:
    reasons = "\n".join(f"{count} × {reason}" for reason, count in _reasons(report))
    complete = report.received == report.planned and report.outcome == NightOutcome.COMPLETE
    failed = report.statuses.get("failed", 0) + report.statuses.get("incorrect", 0)
    results = f"{report.outcome}: {report.received} of {report.planned} results, {failed} failed"
    tag = "" if complete and not failed else "error"
    yield JUnitCase(report.gpu, "results", tag, results, report.outcome, reasons)
    for line in report.worse:
        yield JUnitCase(report.gpu, line, "failure", line, "regression")
    for case, base, reason in report.uncompared:
        yield JUnitCase(report.gpu, case, "skipped", f"not compared with {base[:10]}: {reason}")
    passed = sum(report.verdicts.values()) - len(report.worse)
    if passed > 0:
        yield JUnitCase(report.gpu, f"{passed} comparisons without a regression")


def _changed_alerts(report: KindReport) -> Sequence[str]:
    """Name the alerts that moved or ended, with the reasons if the report has them."""
    return report.changed or [f"fixed alert {number}" for number in report.fixed]


def _budget(report: KindReport) -> list[str]:
    """Report the candidates that were not compared, and the option to compare more."""
    waiting = report.not_compared
    if not waiting:
        return []
    shown = ", ".join(f"{key} ({sigmas:+.1f} sigmas)" for key, _, sigmas in waiting[:3])
    oldest = max(nights for _, nights, _ in waiting)
    return [
        f"{len(waiting)} candidates were not compared, as the budget is {report.budget} "
        f"(--comparisons); the most suspicious are {shown}; the longest waits for {oldest} "
        f"night{'s' if oldest > 1 else ''}"
    ]


def _uncompared(report: KindReport) -> list[str]:
    """Name the comparisons without a result, by commit and reason."""
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for case, base, reason in report.uncompared:
        cases[base, reason].append(case)
    return [
        f"{len(keys)} of {report.comparisons} comparisons have no result, with {base[:10]}: "
        f"{reason} ({', '.join(keys[:3])}{', …' if keys[3:] else ''})"
        for (base, reason), keys in cases.items()
    ]


def _reasons(report: KindReport) -> list[tuple[str, int]]:
    ordered = sorted(report.reasons.items(), key=lambda item: -item[1])
    return ordered[:_MAX_LINES]


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(numbers.items()))
