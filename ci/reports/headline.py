"""A gate's answer in one line, and the words that all its reports share."""

from __future__ import annotations

from ci.gate_perf import Finding, GateReport, Outcome
from flexq_bench.exit_codes import ExitCode

SAID = {
    ExitCode.PASS: "passed",
    ExitCode.REGRESSION: "failed",
    ExitCode.AMBIGUOUS: "undecided",
    ExitCode.MISSING: "incomplete",
}
TRUSTING = "head was measured with its own program (--trust-head)"
_SHA = 10


def headline(report: GateReport) -> str:
    """`failed: 2 regressions, 58 pass; 60 of 60 cases compared`."""
    counts = []
    for outcome in Outcome:
        count = len(report.with_outcome(outcome))
        if count:
            countable = outcome in (Outcome.REGRESSION, Outcome.PROBE)
            plural = "s" if countable and count > 1 else ""
            counts.append(f"{count} {outcome}{plural}")
    compared = f"{report.compared} of {len(report.findings)} cases compared"
    said = f"{SAID[report.exit_code]}: {', '.join(counts) or 'nothing planned'}; {compared}"
    return f"{said}; {TRUSTING}" if report.trusts_head else said


def between(report: GateReport) -> str:
    """`abcdef1234 -> 1234abcdef on NVIDIA H200`."""
    return f"{report.base.sha[:_SHA]} -> {report.head.sha[:_SHA]} on {report.gpu}"


def change(finding: Finding) -> str:
    """`+3.1 % (+2.5 … +3.7 %)`; empty: nothing was judged."""
    if finding.change is None or finding.low is None or finding.high is None:
        return ""
    return f"{finding.change:+.2f} % ({finding.low:+.2f} … {finding.high:+.2f} %)"


def shape(finding: Finding) -> str:
    """M x N x K."""
    gemm = finding.case.gemm
    return f"{gemm.m}x{gemm.n}x{gemm.k}"
