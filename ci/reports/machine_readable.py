"""Report of the performance gate as JSON."""

from __future__ import annotations

import json

from flexq_bench.ci.gate_perf import Finding, GateReport
from flexq_bench.ci.reports.headline import headline

SCHEMA_VERSION = 1


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
