"""Table rows of alerts, and their assignees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import Any

from flexq_bench.dashboard.shared.formatting import (
    as_interval,
    local_time,
    percent_change,
    short_commit,
)
from flexq_bench.dashboard.shared.links import page_address
from flexq_bench.db.queries import AlertEventRow, AlertRow
from flexq_bench.results.alert_level import AlertLevel
from flexq_bench.stats import Interval
from flexq_bench.verdicts.texts import alert_text

_ASSIGNED = "assigned to "


def assignment_note(person: str) -> str:
    """Return the note that assigns an alert to a person."""
    return f"{_ASSIGNED}{person}"


def assignee(events: Sequence[AlertEventRow]) -> str:
    """Return the last assignee of an alert, or the person of its last event; empty: nobody."""
    for event in reversed(events):
        if event.note.startswith(_ASSIGNED):
            return event.note.removeprefix(_ASSIGNED)
        if event.person:
            return event.person
    return ""


def triage_rows(
    alerts: Sequence[AlertRow],
    levels: Mapping[int, AlertLevel],
    people: Mapping[int, str],
    zone: tzinfo,
) -> list[dict[str, Any]]:
    """Return one row per alert."""
    return [
        {
            "alert": page_address("alert", alert=str(row.id)),
            "kernel": ", ".join(row.kernels) or row.family,
            "worst": alert_text(row) or "wrong results",
            "verdicts": row.decisions,
            "now": levels[row.id].words,
            "against the last good": percent_change(_ratio(levels[row.id])),
            "95 % interval": as_interval(_ratio(levels[row.id])),
            "state": row.state,
            "assigned": people.get(row.id, ""),
            "GPU": ", ".join(row.gpus),
            "commits": f"{short_commit(row.good.sha, dirty=False) if row.good else ''}.."
            f"{short_commit(row.bad.sha, dirty=False)}",
            "subject": row.bad.subject,
            "author": row.bad.author,
            "opened": local_time(row.opened_at, zone),
            "note": row.note,
        }
        for row in alerts
    ]


def _ratio(level: AlertLevel) -> Interval | None:
    return None if level.change is None else level.change.ratio
