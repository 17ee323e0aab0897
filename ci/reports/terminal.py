"""A gate's report as a table in the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from ci.gate_perf import GateReport, Outcome
from ci.reports.headline import change


def findings_table(report: GateReport) -> Table | None:
    """Every case that is not the same, the worst first; None: all are the same."""
    loud = [
        finding
        for outcome in Outcome
        for finding in report.with_outcome(outcome)
        if outcome is not Outcome.PASS or finding.verdict != "same"
    ]
    if not loud:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("outcome", "case", "change", "limit", "owner", "why"):
        right = name in ("change", "limit")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for finding in loud:
        reason = finding.verdict if finding.change is not None else finding.reason
        why = reason if finding.waiver is None else f"{reason}: {finding.waiver.reason}"
        table.add_row(
            str(finding.outcome),
            finding.case.key,
            change(finding),
            f"{finding.limit:g} %",
            finding.owner,
            why,
        )
    return table
