"""Notification events, each written in the transaction that stores its cause.

No event is written for canaries (a commit compared with itself), for changes that the machine
caused (cause `environment`), or for a pull request's verdicts, beyond the failure of its gate. Each
event has a key derived from its subject, so that a resumed night, or a history that is judged
again, adds no duplicate.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from flexq_bench.ci.history_alerts import HistoryVerdicts
from flexq_bench.ci.report_data import GateReport, KindReport
from flexq_bench.ci.reports.nightly import lines
from flexq_bench.db import queries
from flexq_bench.db.decisions import OPEN_STATES
from flexq_bench.db.engine import Session
from flexq_bench.db.outbox import DeliveryRow, EventInfo, add_event
from flexq_bench.db.records import GateRecord, Record
from flexq_bench.exit_codes import ExitCode
from flexq_bench.verdicts import Cause, Judged, Verdict
from flexq_bench.verdicts.alert_rule import kernel_family
from flexq_bench.verdicts.alerts import AlertChange
from flexq_bench.verdicts.texts import alert_text, decision_text
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.probes import calibrates

MIN_CRITICAL_CHANGE = math.log(1.10)  # slow-down from which an event is `critical`, else `warning`
_SHA = 10
_MAX_LINES = 12  # per list in a message; the rest is counted


def add_alert_events(
    session: Session,
    opened: Iterable[int],
    changed: Iterable[AlertChange] = (),
    *,
    at: datetime | None = None,
) -> None:
    """Add an event per opened alert, a warning, or critical if 10 % slower or wrong; and one per
    alert that moved or ended, with the reason.
    """
    for change in changed:
        alert = queries.alert_by_id(session, change.alert)
        _add(
            session,
            key=f"alert {change.alert} {len(queries.alert_events(session, change.alert))}",
            kind="alert",
            severity="info",
            subject=f"Alert {change.alert} is {change.state}: {alert.family} on "
            f"{', '.join(alert.gpus) or 'no GPU'}",
            lines=[change.reason, f"flexq-bench explain {change.alert}"],
            kernels=alert.kernels,
            gpus=alert.gpus,
            content={"alert": change.alert, "state": change.state, "family": alert.family},
            at=at,
        )
    for alert_id in opened:
        alert = queries.alert_by_id(session, alert_id)
        members = queries.alert_decisions(session, alert_id)
        labels = _labels(session, members)
        wrong = any(decision.verdict == Verdict.INCORRECT for decision in members)
        slow = alert.worst is not None and alert.worst >= MIN_CRITICAL_CHANGE
        size = "wrong results" if wrong else alert_text(alert)
        lines = [
            f"{alert.good.sha[:_SHA] if alert.good else 'its first result'}"
            f"..{alert.bad.sha[:_SHA]} {alert.bad.subject}".rstrip(),
            *_truncated(
                [f"{labels[decision.series_id]}: {decision.reason}" for decision in members]
            ),
            f"flexq-bench explain {alert_id}",
        ]
        gpus = ", ".join(alert.gpus) or "no GPU"
        _add(
            session,
            key=f"alert {alert_id}",
            kind="alert",
            severity="critical" if wrong or slow else "warning",
            subject=f"Alert {alert_id}: {alert.family} {size} on {gpus}",
            lines=lines,
            kernels=labels.values(),
            gpus=alert.gpus,
            content={
                "alert": alert_id,
                "family": alert.family,
                "good": None if alert.good is None else alert.good.sha,
                "bad": alert.bad.sha,
                "worst_log_ratio": alert.worst,
            },
            at=at,
        )


def add_improvement_events(
    session: Session, judged: Iterable[Judged], gpu: str, *, at: datetime | None = None
) -> None:
    """Add an event per family and commit range that the code made faster."""
    groups: dict[tuple[str, str, str], list[Judged]] = {}
    for decision in judged:
        confirmation = decision.confirmation
        not_by_code = confirmation.cause is Cause.ENVIRONMENT or calibrates(decision.case.kernel)
        if decision.is_canary or not_by_code or confirmation.verdict is not Verdict.FASTER:
            continue
        key = (kernel_family(decision.case.kernel), decision.compared.base, decision.compared.head)
        groups.setdefault(key, []).append(decision)
    for (family, base, head), members in groups.items():
        best = min(decision.confirmation.log_ratio for decision in members)
        _add(
            session,
            key=f"improvement {family} {base} {head} {gpu}",
            kind="improvement",
            severity="info",
            subject=f"Faster: {family} {math.expm1(best):+.1%} on {gpu}",
            lines=[
                f"{base[:_SHA]}..{head[:_SHA]}",
                *_truncated(
                    [f"{decision.case.key}: {decision.confirmation.reason}" for decision in members]
                ),
            ],
            kernels=[decision.case.label for decision in members],
            gpus=[gpu],
            content={"family": family, "base": base, "head": head, "best_log_ratio": best},
            at=at,
        )


def add_history_events(
    session: Session,
    verdicts: HistoryVerdicts,
    *,
    at: datetime | None = None,
) -> None:
    """Add events of the alerts and improvements found in the histories of other projects."""
    add_alert_events(session, verdicts.opened, verdicts.changed, at=at)
    for decision in queries.decisions_by_uuid(session, verdicts.improved):
        label = _labels(session, [decision])[decision.series_id]
        _add(
            session,
            key=f"improvement {decision.uuid}",
            kind="improvement",
            severity="info",
            subject=f"Better: {label} {decision_text(decision)} on {decision.gpu}",
            lines=[f"{(decision.base or '')[:_SHA]}..{decision.head[:_SHA]}", decision.reason],
            kernels=[label],
            gpus=[decision.gpu],
            content={"series": decision.series_id, "base": decision.base, "head": decision.head},
            at=at,
        )


def add_gate_event(session: Session, report: GateReport, *, at: datetime | None = None) -> None:
    """Add an event if a performance gate did not pass, with its failing cases; not for a canary."""
    failed = [
        finding
        for finding in report.findings
        if finding.outcome in ("missing", "regression", "ambiguous")
    ]
    if not failed or report.base.sha == report.head.sha:
        return
    worst = int(report.exit_code)
    _add(
        session,
        key=f"gate perf {report.policy} {report.gpu} {report.base.sha} {report.head.sha} {worst}",
        kind="gate",
        severity="warning"
        if all(finding.outcome == "ambiguous" for finding in failed)
        else "critical",
        subject=f"gate perf: {len(failed)} of {len(report.findings)} cases do not pass "
        f"({report.base.sha[:_SHA]}..{report.head.sha[:_SHA]} on {report.gpu})",
        lines=_truncated(
            [f"{finding.outcome}: {finding.case.key}, {finding.reason}" for finding in failed]
        ),
        kernels=[finding.case.label for finding in failed],
        gpus=[report.gpu],
        content={
            "policy": report.policy,
            "base": report.base.sha,
            "head": report.head.sha,
            "exit_code": worst,
            "cases": len(failed),
        },
        at=at,
    )


def add_accuracy_gate_events(session: Session, records: Iterable[GateRecord]) -> None:
    """Add an event per scheme that did not pass `gate accuracy`, with its failing limits."""
    for record in records:
        if record.exit_code == 0:
            continue
        failed = [lim for lim in record.limits if lim.outcome != "pass" and not lim.allowed]
        _add(
            session,
            key=f"gate accuracy {record.uuid}",
            kind="gate",
            severity="warning" if record.exit_code == ExitCode.AMBIGUOUS else "critical",
            subject=f"gate accuracy: {record.scheme} of {record.model} is {record.verdict}",
            lines=_truncated(
                [f"{limit.check}: {limit.outcome}, {limit.reason}" for limit in failed]
            ),
            content={
                "model": record.model,
                "scheme": record.scheme,
                "policy": record.policy,
                "content_hash": record.content_hash,
                "exit_code": record.exit_code,
            },
            at=datetime.fromisoformat(record.created_at),
        )


def add_nightly_event(session: Session, report: KindReport, *, at: datetime | None = None) -> None:
    """Add an event if a nightly run is not complete on one kind of GPU, or has failed or wrong
    results."""
    missing = report.planned - report.received
    failed, wrong = (report.statuses.get(status, 0) for status in ("failed", "incorrect"))
    uncompared = len(report.uncompared)
    if not missing and not failed and not wrong and not uncompared:
        return
    problems = [
        *([f"{missing} of {report.planned} planned results are missing"] if missing else []),
        *([f"{uncompared} of {report.comparisons} comparisons are missing"] if uncompared else []),
        *([f"{failed} cases failed"] if failed else []),
        *([f"{wrong} cases are wrong"] if wrong else []),
    ]
    _add(
        session,
        key=f"nightly {report.night} {report.suite} {report.gpu} {report.commit}",
        kind="nightly",
        severity="critical" if wrong or not report.received else "warning",
        subject=f"Night {report.night} ({report.suite}) on {report.gpu}: {', '.join(problems)}",
        lines=_truncated([f"{count} × {reason}" for reason, count in report.reasons.items()]),
        gpus=[report.gpu],
        content={"night": report.night, "suite": report.suite, "run": report.run},
        at=at,
    )


def add_wrong_result_event(
    session: Session, night: str, suite: str, record: Record, *, at: datetime | None = None
) -> bool:
    """Add an event of the first wrong result of a night on a kind of GPU, before the night ends.

    Return False if there is one already: the night's own event counts all of them.
    """
    return _add(
        session,
        key=f"nightly {night} {suite} {record.gpu} {record.commit.sha} wrong",
        kind="nightly",
        severity="critical",
        subject=f"Night {night} ({suite}) has a wrong result on {record.gpu}",
        lines=[f"{record.case}: {record.detail}", "the night goes on, and its report names all"],
        content={"night": night, "suite": suite, "case": record.case},
        kernels=[record.kernel],
        gpus=[record.gpu],
        at=at,
    )


def add_broken_night_event(
    session: Session, night: str, suite: str, commit: str, lines: Sequence[str], *, at: datetime
) -> None:
    """Add an event of a nightly run that ended with an error. lines: the reason, what to do."""
    _add(
        session,
        key=f"nightly {night} {suite} {commit} broken",
        kind="nightly",
        severity="critical",
        subject=f"Night {night} ({suite}) is broken",
        lines=lines,
        content={"night": night, "suite": suite, "commit": commit},
        at=at,
    )


def add_unloaded_kernels_event(
    session: Session, night: str, suite: str, commit: str, reasons: Sequence[str]
) -> None:
    """Add an event of a nightly run without the kernels of some sources, which do not load."""
    count = f"{len(reasons)} file{'s' if reasons[1:] else ''} of kernels"
    _add(
        session,
        key=f"nightly {night} {suite} {commit} unloaded",
        kind="nightly",
        severity="warning",
        subject=f"Night {night} ({suite}) is without {count}, which did not load",
        lines=_truncated(reasons),
        content={"night": night, "suite": suite, "commit": commit},
        at=None,
    )


def add_late_night_event(
    session: Session, night: str, suite: str, hour: str, state: str, *, at: datetime
) -> bool:
    """Add an event of a nightly run that is late; return False if there is one already."""
    return _add(
        session,
        key=f"nightly {night} {suite} late",
        kind="nightly",
        severity="critical",
        subject=f"Night {night} ({suite}) was not done by {hour} UTC",
        lines=[state],
        content={"night": night, "suite": suite, "hour": hour},
        at=at,
    )


def add_digest_event(
    session: Session,
    night: str,
    suite: str,
    reports: Sequence[KindReport],
    *,
    at: datetime | None = None,
) -> None:
    """Add one event per night and suite: results on every kind of GPU, and open alerts."""
    still_open = queries.alerts(session, states=OPEN_STATES)
    opened = sum(len(report.opened) for report in reports)
    fixed = sum(len(report.fixed) for report in reports)
    _add(
        session,
        key=f"digest {night} {suite}",
        kind="digest",
        severity="info",
        subject=f"Night {night} ({suite}): {opened} alerts opened, {fixed} fixed, "
        f"{len(still_open)} open",
        lines=[
            *lines(reports),
            *_truncated(
                [
                    f"open: alert {alert.id}, {alert.family}, {alert.state}, "
                    f"since {alert.opened_at:%Y-%m-%d}"
                    for alert in still_open
                ]
            ),
        ],
        gpus=[report.gpu for report in reports],
        content={
            "night": night,
            "suite": suite,
            "opened": opened,
            "fixed": fixed,
            "open": len(still_open),
        },
        at=at,
    )


def _add(
    session: Session,
    *,
    key: str,
    kind: str,
    severity: str,
    subject: str,
    lines: Iterable[str],
    content: Mapping[str, Any],
    kernels: Iterable[str] = (),
    gpus: Iterable[str] = (),
    at: datetime | None,
) -> bool:
    event = EventInfo(
        key=key,
        kind=kind,
        severity=severity,
        subject=_printable(subject),
        body="\n".join(map(_printable, lines)),
        created_at=at or datetime.now(UTC),
        kernels=tuple(dict.fromkeys(kernels)),
        gpus=tuple(dict.fromkeys(gpus)),
        content=content,
    )
    return add_event(session, event)


def _labels(session: Session, members: Sequence[queries.DecisionRow]) -> dict[int, str]:
    """Return the kernel's label by series, prefixed by the name of another project."""
    projects = {row.id: row.project for row in queries.project_series(session)}
    return {
        decision.series_id: "/".join(
            filter(
                None,
                (projects.get(decision.series_id), kernel_label(decision.kernel, decision.variant)),
            )
        )
        for decision in members
    }


def _truncated(lines: Sequence[str]) -> list[str]:
    first = list(lines[:_MAX_LINES])
    return first + ([f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else [])


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def test_delivery(subscription: str) -> DeliveryRow:
    """Return a test message, which is not stored."""
    at = datetime.now(UTC)
    event = EventInfo(
        key=f"test {at.isoformat()}",
        kind="test",
        severity="info",
        subject="Test message of FlexQ Bench",
        body=f"Messages for {subscription} arrive here.",
        created_at=at,
    )
    return DeliveryRow(str(uuid.uuid4()), subscription, "sending", 0, at, None, "", event)
