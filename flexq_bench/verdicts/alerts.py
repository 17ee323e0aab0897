"""Opening and closing of alerts by verdicts; people close them with `alerts` or the dashboard.

Every change of an alert's state is stored by flexq_bench.db.decisions.set_alert_state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime

from flexq_bench.db import queries
from flexq_bench.db.decisions import OPEN_STATES, join_alert, open_alert, set_alert_state
from flexq_bench.db.engine import Session
from flexq_bench.verdicts.alert_rule import Group, alert_of


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
        join_alert(session, alert_id, group.members)
    return tuple(opened), tuple(alert for alert in joined if alert not in opened)


def close_fixed_alerts(
    session: Session, closing_note: Callable[[queries.AlertRow], str | None], at: datetime
) -> tuple[int, ...]:
    """Close the open alerts that are fixed, and return their ids.

    closing_note: says of an open alert how it is fixed; None: it is not.
    """
    fixed = []
    for alert in queries.alerts(session, states=OPEN_STATES):
        note = closing_note(alert)
        if note is not None:
            set_alert_state(session, alert.id, "fixed", person="", note=note, at=at)
            fixed.append(alert.id)
    return tuple(fixed)
