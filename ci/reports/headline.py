"""The result of a performance gate in one line, and texts common to its reports."""

from __future__ import annotations

from flexq_bench.ci.gate_perf import Finding, GateReport, Outcome
from flexq_bench.exit_codes import ExitCode

EXIT_WORDS = {
    ExitCode.PASS: "passed",
    ExitCode.REGRESSION: "failed",
    ExitCode.AMBIGUOUS: "undecided",
    ExitCode.MISSING: "incomplete",
}
STOPPED_EARLY = "clear, so stopped early"
_TRUSTED_HEAD = "head was measured with its own program (--trust-head)"
_SHA = 10


def headline(report: GateReport) -> str:
    """Return a line like `failed: 2 regressions, 58 pass; 60 of 60 cases compared`."""
    counts = []
    for outcome in Outcome:
        count = len(report.with_outcome(outcome))
        if count:
            countable = outcome in (Outcome.REGRESSION, Outcome.PROBE)
            plural = "s" if countable and count > 1 else ""
            counts.append(f"{count} {outcome}{plural}")
    compared = f"{report.compared} of {len(report.findings)} cases compared"
    line = f"{EXIT_WORDS[report.exit_code]}: {', '.join(counts) or 'nothing planned'}; {compared}"
    return f"{line}; {_TRUSTED_HEAD}" if report.trusts_head else line


def between(report: GateReport) -> str:
    """Return the commits and the GPU, as `abcdef1234 -> 1234abcdef on NVIDIA H200`."""
    return f"{report.base.sha[:_SHA]} -> {report.head.sha[:_SHA]} on {report.gpu}"


def change(finding: Finding) -> str:
    """Format the change, as `+3.1 % (+2.5 … +3.7 %)`; empty: nothing was judged."""
    if finding.change is None or finding.low is None or finding.high is None:
        return ""
    return f"{finding.change:+.2f} % ({finding.low:+.2f} … {finding.high:+.2f} %)"


def shape(finding: Finding) -> str:
    """Format the shape as MxNxK."""
    gemm = finding.case.gemm
    return f"{gemm.m}x{gemm.n}x{gemm.k}"
