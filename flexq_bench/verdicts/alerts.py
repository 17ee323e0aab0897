"""Opening, moving and ending of alerts by verdicts; people use `alerts` or the dashboard.

Every change of an alert's state is stored by flexq_bench.db.decisions.set_alert_state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime

from flexq_bench.db import queries
from flexq_bench.db.decisions import (
    OPEN_STATES,
    join_alert,
    move_alert,
    open_alert,
    set_alert_state,
)
from flexq_bench.db.engine import Session
from flexq_bench.verdicts.alert_rule import Group, alert_of
from flexq_bench.verdicts.standing import MOVED, Outcome, judge_alerts


def open_or_join_alerts(
    session: Session, groups: Iterable[Group], at: datetime
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of alerts that groups of new decisions opened, and of those they joined."""
    opened: dict[int, None] = {}
    joined: dict[int, None] = {}
    for group in groups:
        # Floors, and external kernels with equal names, have the same family in all projects.
        alerts = queries.alerts(session, family=group.family)
        known = alert_of(
            group, [alert for alert in alerts if alert.bad.project == group.bad.project]
        )
        if known is None:
            alert_id = open_alert(
                session,
                group.family,
                group.good.sha,
                group.bad.sha,
                at,
                project=group.bad.project,
            )
            opened[alert_id] = None
        else:
            alert_id = known.id
            joined[alert_id] = None
            if known.state == "ended":
                note = "reopened: the change is in the results again"
                set_alert_state(session, alert_id, "new", person="", note=note, at=at)
        join_alert(session, alert_id, group.members)
    return tuple(opened), tuple(alert for alert in joined if alert not in opened)


@dataclass(frozen=True, slots=True)
class AlertChange:
    """An alert that moved, ended, or was reopened. state: MOVED, or its new state."""

    alert: int
    state: str
    reason: str

    @property
    def text(self) -> str:
        if self.state == MOVED:
            return f"alert {self.alert} has moved {self.reason}"
        return f"alert {self.alert} is {self.state}: {self.reason}"


def judge_open_alerts(
    session: Session, at: datetime, *, projects: Collection[str]
) -> tuple[AlertChange, ...]:
    """Judge the evidence of the open alerts of projects again; move or end those that need it.

    projects: names; an empty name: this repository. The reasons are stored as notes. What a person
    has reopened is not ended again for the same reason.
    """
    changes = []
    of_projects = [
        alert
        for alert in queries.alerts(session, states=OPEN_STATES)
        if alert.bad.project in projects
    ]
    for alert, outcome in list(judge_alerts(session, of_projects)):
        if outcome is None or _is_overruled(session, alert, outcome):
            continue
        state, reason = outcome.state, outcome.reason
        if outcome.state == MOVED and outcome.range is not None:
            good, bad = outcome.range
            reason = f"to {good[:10]}..{bad[:10]}: {reason}"
            other = move_alert(session, alert.id, good, bad, note=f"moved {reason}", at=at)
            if other is not None:
                state, reason = "ended", f"alert {other} is about {good[:10]}..{bad[:10]}"
        if state != MOVED:
            set_alert_state(session, alert.id, state, person="", note=reason, at=at)
        changes.append(AlertChange(alert.id, state, reason))
    return tuple(changes)


def _is_overruled(session: Session, alert: queries.AlertRow, outcome: Outcome) -> bool:
    events = queries.alert_events(session, alert.id)
    return bool(events[-1].person) and any(
        (event.state, event.note, event.person) == (outcome.state, outcome.reason, "")
        for event in events
    )
