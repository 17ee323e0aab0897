"""The performance gate: compare every planned case and judge the results by a policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date
from types import MappingProxyType

from flexq_bench.ci.notifications import events
from flexq_bench.ci.policy import Limit, Policy
from flexq_bench.ci.report_data import Finding, GateOutcome, GateReport
from flexq_bench.db.engine import Database
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.runs.commit_history import store_history
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts import Cause, Comparer, Confirmation, Judged, Verdict
from flexq_bench.verdicts.limits import is_within
from flexq_bench.verdicts.nightly import record_night
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import calibrates

_NAN = math.nan
_NO_RESULT = Confirmation(
    Verdict.NO_DATA, Cause.NONE, "no result arrived", _NAN, _NAN, _NAN, _NAN, _NAN, 0, 0
)


def gate_perf(
    policy: Policy,
    plan: Sequence[Case],
    comparer: Comparer,
    database: Database,
    machine: Machine,
    base: CommitInfo,
    head: CommitInfo,
    *,
    alerting: bool,
    today: date,
    notes: Sequence[str] = (),
    trusts_head: bool = False,
    devices: Mapping[str, DeviceInfo] = MappingProxyType({}),
) -> GateReport:
    """Compare the planned cases, store every verdict, and judge them by the policy.

    plan: cases that must have a result. comparer: compares them. alerting: as in record_night.
    today: date at which waivers are evaluated. notes: added to the report. trusts_head: True if the
    comparer measures head with its own program. devices: that measured the cases, by key, where it
    was not machine's; read when all are compared. Raises errors of the comparer and the database;
    nothing is stored then.
    """
    policy = policy.on(machine.device.sku)
    received = {compared.case.key: compared for compared in comparer(plan)}
    store_history(database, head)  # the line that its verdicts belong to
    with database.session() as session:
        night = record_night(
            session,
            list(received.values()),
            machine,
            {base.sha: base, head.sha: head},
            alerting=alerting,
            devices=[devices.get(key, machine.device) for key in received],
        )
        events.add_alert_events(session, night.opened, night.changed)
    judged = {verdict.case.key: verdict for verdict in night.judged}
    findings = tuple(_finding(case, judged.get(case.key), policy, today) for case in plan)
    report = GateReport(
        base=base,
        head=head,
        gpu=machine.device.sku,
        policy=policy.name,
        suite=policy.suite.name,
        findings=findings,
        notes=(
            *notes,
            *_notes(policy, findings, today),
            *(change.text for change in night.changed),
        ),
        opened=night.opened,
        joined=night.joined,
        fixed=night.fixed,
        trusts_head=trusts_head,
    )
    with database.session() as session:
        events.add_gate_event(session, report)
    return report


def _finding(case: Case, judged: Judged | None, policy: Policy, today: date) -> Finding:
    limit = policy.limit_of(case).slower_percent
    confirmation = _NO_RESULT if judged is None else judged.confirmation
    outcome = GateOutcome.MISSING if judged is None else _outcome(judged, limit)
    waiver = None
    # Incorrect results are never waived.
    accepted = outcome in (GateOutcome.PASS, GateOutcome.SAME_CODE, GateOutcome.PROBE)
    if not accepted and confirmation.verdict is not Verdict.INCORRECT:
        waiver = policy.waiver_of(case, today)
    return Finding(
        case,
        GateOutcome.WAIVED if waiver else outcome,
        confirmation.verdict.value,
        confirmation.cause.value,
        confirmation.reason,
        change=_percent(confirmation.log_ratio),
        low=_percent(confirmation.low),
        high=_percent(confirmation.high),
        limit=limit,
        owner=policy.owner_of(case),
        pairs=confirmation.placements,
        stopped_early=confirmation.stopped_early,
        waiver=waiver,
        pairs_needed=None if judged is None else judged.compared.pairs_needed,
        need=judged.compared.need if judged and outcome is GateOutcome.AMBIGUOUS else "",
    )


def _outcome(judged: Judged, limit: float) -> GateOutcome:
    confirmation: Confirmation = judged.confirmation
    if judged.evidence.comparison.same_code and confirmation.verdict is Verdict.SAME:
        return GateOutcome.SAME_CODE
    if confirmation.verdict is Verdict.NO_DATA:
        if judged.compared.pairs_needed is not None:  # its time was not spent on it
            return GateOutcome.AMBIGUOUS
        is_corrected = not judged.evidence.comparison.base_correct
        return GateOutcome.PASS if is_corrected else GateOutcome.MISSING
    if confirmation.verdict is Verdict.INCORRECT:
        return GateOutcome.REGRESSION
    if calibrates(judged.case.kernel):
        return GateOutcome.PROBE
    return outcome_of(confirmation, limit, is_worse=judged.is_worse)


def outcome_of(confirmation: Confirmation, limit: float, *, is_worse: bool) -> GateOutcome:
    """Return the outcome of a comparison. limit: accepted slow-down, percent."""
    if is_worse and math.expm1(confirmation.log_ratio) * 100 > limit:
        return GateOutcome.REGRESSION
    if confirmation.verdict is Verdict.AMBIGUOUS and not is_within(confirmation, limit):
        return GateOutcome.AMBIGUOUS
    return GateOutcome.PASS


def _notes(policy: Policy, findings: Sequence[Finding], today: date) -> list[str]:
    cases = [finding.case for finding in findings]
    notes = []
    for waiver in policy.waivers:
        title = f"waiver of {waiver.name} ({waiver.owner}: {waiver.reason})"
        if waiver.has_expired(today):
            notes.append(f"{title} expired on {waiver.expires} and is ignored: delete or renew it")
        elif not any(waiver.fits(case) for case in cases):
            notes.append(f"{title} fits no planned case: delete or correct it")
        elif not any(finding.waiver is waiver for finding in findings):
            notes.append(f"{title} was not needed")
    notes += [
        f"limit of {limit.name} fits no planned case{_but_probes(limit, cases)}: "
        "delete or correct it"
        for limit in policy.limits
        if not any(limit.fits(case) for case in cases if not calibrates(case.kernel))
    ]
    notes += [
        f"{finding.case.key}: {finding.reason}"
        for finding in findings
        if finding.outcome is GateOutcome.PASS and finding.verdict == Verdict.NO_DATA
    ]
    return notes


def _but_probes(limit: Limit, cases: Sequence[Case]) -> str:
    return " but probes, which have none" if any(map(limit.fits, cases)) else ""


def _percent(log_ratio: float) -> float | None:
    return 100 * math.expm1(log_ratio) if math.isfinite(log_ratio) else None
