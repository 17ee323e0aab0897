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
from typing import TYPE_CHECKING, Any

from db import queries
from db.engine import Session
from db.outbox import DeliveryRow, EventInfo, add_event
from flexq_bench.exit_codes import ExitCode
from flexq_bench.verdicts import Cause, Judged, Verdict
from flexq_bench.verdicts.alert_rule import kernel_family
from workloads.case import kernel_label
from workloads.probes import calibrates

if TYPE_CHECKING:
    from ci.gate_perf import GateReport
    from ci.history_alerts import HistoryVerdicts
    from ci.nightly import KindReport
    from db.gate_records import GateRecord

CRITICAL_CHANGE = math.log(1.10)  # a slow-down that is `critical`; a smaller one is a `warning`
_SHA = 10
_LINES = 12  # of a message; then how many more


def tell_alerts(session: Session, alerts: Iterable[int], *, at: datetime | None = None) -> None:
    """One event for each alert that was opened: slower is a warning, 10 % or wrong is critical."""
    for alert_id in alerts:
        alert = queries.alert_by_id(session, alert_id)
        members = queries.alert_decisions(session, alert_id)
        labels = _labels(session, members)
        wrong = any(one.verdict == Verdict.INCORRECT for one in members)
        slow = alert.worst is not None and alert.worst >= CRITICAL_CHANGE
        change = "wrong results" if wrong else f"{math.expm1(alert.worst or 0.0):+.1%}"
        lines = [
            f"{alert.good.sha[:_SHA] if alert.good else 'its first result'}"
            f"..{alert.bad.sha[:_SHA]} {alert.bad.subject}".rstrip(),
            *_cut([f"{labels[one.series_id]}: {one.reason}" for one in members]),
            f"flexq-bench explain {alert_id}",
        ]
        _tell(
            session,
            key=f"alert {alert_id}",
            kind="alert",
            severity="critical" if wrong or slow else "warning",
            subject=f"Alert {alert_id}: {alert.family} {change} on {_named(alert.gpus)}",
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


def tell_improvements(
    session: Session, judged: Iterable[Judged], gpu: str, *, at: datetime | None = None
) -> None:
    """One event for each family and range of commits that got faster by its code's doing."""
    groups: dict[tuple[str, str, str], list[Judged]] = {}
    for one in judged:
        confirmation = one.confirmation
        by_the_machine = confirmation.cause is Cause.ENVIRONMENT or calibrates(one.case.kernel)
        if one.is_canary or by_the_machine or confirmation.verdict is not Verdict.FASTER:
            continue
        key = (kernel_family(one.case.kernel), one.compared.base, one.compared.head)
        groups.setdefault(key, []).append(one)
    for (family, base, head), members in groups.items():
        best = min(one.confirmation.log_ratio for one in members)
        _tell(
            session,
            key=f"improvement {family} {base} {head} {gpu}",
            kind="improvement",
            severity="info",
            subject=f"Faster: {family} {math.expm1(best):+.1%} on {gpu}",
            lines=[
                f"{base[:_SHA]}..{head[:_SHA]}",
                *_cut([f"{one.case.key}: {one.confirmation.reason}" for one in members]),
            ],
            kernels=[one.case.label for one in members],
            gpus=[gpu],
            content={"family": family, "base": base, "head": head, "best_log_ratio": best},
            at=at,
        )


def tell_history(
    session: Session, verdicts: HistoryVerdicts, *, at: datetime | None = None
) -> None:
    """Events of what the histories of other projects came to: alerts, and improvements."""
    tell_alerts(session, verdicts.opened, at=at)
    for one in queries.decisions_by_uuid(session, verdicts.improved):
        label = _labels(session, [one])[one.series_id]
        _tell(
            session,
            key=f"improvement {one.uuid}",
            kind="improvement",
            severity="info",
            subject=f"Better: {label} {math.expm1(one.log_ratio or 0.0):+.1%} on {one.gpu}",
            lines=[f"{(one.base or '')[:_SHA]}..{one.head[:_SHA]}", one.reason],
            kernels=[label],
            gpus=[one.gpu],
            content={"series": one.series_id, "base": one.base, "head": one.head},
            at=at,
        )


def tell_gate(session: Session, report: GateReport, *, at: datetime | None = None) -> None:
    """An event of a gate that did not pass: with what stopped it. A canary tells nobody."""
    failed = [
        one for one in report.findings if one.outcome in ("missing", "regression", "ambiguous")
    ]
    if not failed or report.base.sha == report.head.sha:
        return
    worst = int(report.exit_code)
    _tell(
        session,
        key=f"gate perf {report.policy} {report.gpu} {report.base.sha} {report.head.sha} {worst}",
        kind="gate",
        severity="warning" if all(one.outcome == "ambiguous" for one in failed) else "critical",
        subject=f"gate perf: {len(failed)} of {len(report.findings)} cases do not pass "
        f"({report.base.sha[:_SHA]}..{report.head.sha[:_SHA]} on {report.gpu})",
        lines=_cut([f"{one.outcome}: {one.case.key}, {one.reason}" for one in failed]),
        kernels=[one.case.label for one in failed],
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


def tell_accuracy_gates(session: Session, records: Iterable[GateRecord]) -> None:
    """An event of each scheme that did not pass `gate accuracy`, with what stopped it."""
    for one in records:
        if one.exit_code == 0:
            continue
        failed = [limit for limit in one.limits if limit.outcome not in ("pass", "waived")]
        _tell(
            session,
            key=f"gate accuracy {one.uuid}",
            kind="gate",
            severity="warning" if one.exit_code == ExitCode.AMBIGUOUS else "critical",
            subject=f"gate accuracy: {one.scheme} of {one.model} is {one.verdict}",
            lines=_cut([f"{limit.check}: {limit.outcome}, {limit.reason}" for limit in failed]),
            content={
                "model": one.model,
                "scheme": one.scheme,
                "policy": one.policy,
                "content_hash": one.content_hash,
                "exit_code": one.exit_code,
            },
            at=datetime.fromisoformat(one.created_at),
        )


def tell_kind(session: Session, report: KindReport, *, at: datetime | None = None) -> None:
    """An event of a night that lacks results, or has failed or wrong ones, on one kind of GPU."""
    missing = report.planned - report.received
    failed, wrong = (report.statuses.get(status, 0) for status in ("failed", "incorrect"))
    if not missing and not failed and not wrong:
        return
    told = [
        *([f"{missing} of {report.planned} planned results are missing"] if missing else []),
        *([f"{failed} cases failed"] if failed else []),
        *([f"{wrong} cases are wrong"] if wrong else []),
    ]
    _tell(
        session,
        key=f"nightly {report.night} {report.suite} {report.gpu} {report.commit}",
        kind="nightly",
        severity="critical" if wrong or not report.received else "warning",
        subject=f"Night {report.night} ({report.suite}) on {report.gpu}: {', '.join(told)}",
        lines=_cut([f"{count} × {reason}" for reason, count in report.reasons.items()]),
        gpus=[report.gpu],
        content={"night": report.night, "suite": report.suite, "run": report.run},
        at=at,
    )


def tell_broken_night(
    session: Session, night: str, suite: str, commit: str, reason: str, *, at: datetime
) -> None:
    """An event of a night that ended by an error."""
    _tell(
        session,
        key=f"nightly {night} {suite} {commit} broken",
        kind="nightly",
        severity="critical",
        subject=f"Night {night} ({suite}) is broken",
        lines=[reason, "go on with: flexq-bench nightly --resume"],
        content={"night": night, "suite": suite, "commit": commit},
        at=at,
    )


def tell_late_night(
    session: Session, night: str, suite: str, hour: str, state: str, *, at: datetime
) -> bool:
    """An event of a night that was not done by its hour; False: it was told before."""
    return _tell(
        session,
        key=f"nightly {night} {suite} late",
        kind="nightly",
        severity="critical",
        subject=f"Night {night} ({suite}) was not done by {hour} UTC",
        lines=[state],
        content={"night": night, "suite": suite, "hour": hour},
        at=at,
    )


def tell_digest(
    session: Session,
    night: str,
    suite: str,
    reports: Sequence[KindReport],
    *,
    at: datetime | None = None,
) -> None:
    """One event a night and suite: what it came to on every kind of GPU, and what is open."""
    from ci.reports.nightly import lines
    from db.decisions import OPEN_STATES

    still_open = queries.alerts(session, states=OPEN_STATES)
    opened = sum(len(report.opened) for report in reports)
    fixed = sum(len(report.fixed) for report in reports)
    _tell(
        session,
        key=f"digest {night} {suite}",
        kind="digest",
        severity="info",
        subject=f"Night {night} ({suite}): {opened} alerts opened, {fixed} fixed, "
        f"{len(still_open)} open",
        lines=[
            *lines(reports),
            *_cut(
                [
                    f"open: alert {one.id}, {one.family}, {one.state}, "
                    f"since {one.opened_at:%Y-%m-%d}"
                    for one in still_open
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


def _tell(
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
        subject=_clean(subject),
        body="\n".join(map(_clean, lines)),
        created_at=at or datetime.now(UTC),
        kernels=tuple(dict.fromkeys(kernels)),
        gpus=tuple(dict.fromkeys(gpus)),
        content=content,
    )
    return add_event(session, event)


def _labels(session: Session, members: Sequence[queries.DecisionRow]) -> dict[int, str]:
    """By series the label that people know the kernel by; another project's with its name."""
    projects = {row.id: row.project for row in queries.project_series(session)}
    return {
        one.series_id: "/".join(
            filter(None, (projects.get(one.series_id), kernel_label(one.kernel, one.variant)))
        )
        for one in members
    }


def _cut(lines: Sequence[str]) -> list[str]:
    kept = list(lines[:_LINES])
    return kept + ([f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else [])


def _named(gpus: Sequence[str]) -> str:
    return ", ".join(gpus) or "no GPU"


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def test_delivery(subscription: str) -> DeliveryRow:
    """A message that says that messages arrive. It is in no database."""
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
