"""Report of the performance gate as JUnit XML: one test per planned case."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from flexq_bench.ci.gate_perf import Finding, GateReport, Outcome
from flexq_bench.ci.reports.headline import between, change

SUITE = "flexq-bench gate perf"
# Characters that XML 1.0 does not allow, even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: GateReport) -> str:
    """Format a report: regressions and ambiguous cases fail, missing are errors, waived skipped."""
    counts = {outcome: len(report.with_outcome(outcome)) for outcome in Outcome}
    totals = {
        "tests": str(len(report.findings)),
        "failures": str(counts[Outcome.REGRESSION] + counts[Outcome.AMBIGUOUS]),
        "errors": str(counts[Outcome.MISSING]),
        "skipped": str(counts[Outcome.WAIVED]),
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", {"name": SUITE, **totals})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("between", between(report)), ("policy", report.policy)):
        ElementTree.SubElement(properties, "property", {"name": name, "value": clean(value)})
    for finding in report.findings:
        _add(suite, finding)
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _add(suite: ElementTree.Element, finding: Finding) -> None:
    test = ElementTree.SubElement(
        suite, "testcase", {"classname": finding.case.label, "name": finding.case.key}
    )
    tag = {
        Outcome.MISSING: "error",
        Outcome.REGRESSION: "failure",
        Outcome.AMBIGUOUS: "failure",
        Outcome.WAIVED: "skipped",
    }.get(finding.outcome)
    if tag is None:
        return
    waiver = finding.waiver
    if waiver is None:
        message = f"{finding.verdict} {change(finding)}, limit {finding.limit:g} %"
    else:
        message = f"waived until {waiver.expires} by {waiver.owner}: {waiver.reason}"
    attributes = {"message": clean(message)}
    if tag != "skipped":
        attributes["type"] = str(finding.outcome)
    element = ElementTree.SubElement(test, tag, attributes)
    element.text = clean(f"{finding.reason} (owner: {finding.owner or 'nobody'})")


def clean(text: str) -> str:
    """Remove characters that XML does not allow."""
    return _FORBIDDEN.sub("", text)
