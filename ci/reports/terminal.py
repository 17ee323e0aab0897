"""Report of the performance gate as a table for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from flexq_bench.ci.gate_perf import GateReport, Outcome
from flexq_bench.ci.reports.headline import STOPPED_EARLY, change


def findings_table(report: GateReport) -> Table | None:
    """Return a table of the cases that changed or failed, worst first; None: there are none."""
    shown = [
        finding
        for outcome in Outcome
        for finding in report.with_outcome(outcome)
        if outcome is not Outcome.PASS or finding.verdict != "same"
    ]
    if not shown:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("outcome", "case", "change", "limit", "pairs", "owner", "why"):
        right = name in ("change", "limit", "pairs")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for finding in shown:
        reason = finding.verdict if finding.change is not None else finding.reason
        if finding.stopped_early:
            reason = f"{reason}: {STOPPED_EARLY}"
        why = reason if finding.waiver is None else f"{reason}: {finding.waiver.reason}"
        table.add_row(
            str(finding.outcome),
            finding.case.key,
            change(finding),
            f"{finding.limit:g} %",
            str(finding.pairs),
            finding.owner,
            why,
        )
    return table
