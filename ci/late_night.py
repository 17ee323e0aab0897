"""Detection of a nightly run that is late."""

from __future__ import annotations

from datetime import datetime

from flexq_bench.ci.notifications.events import add_late_night_event
from flexq_bench.db import queries
from flexq_bench.db.engine import Database


def check_late_night(database: Database, suite: str, hour: str, *, now: datetime) -> str | None:
    """Return the state of today's night of a suite if it is not done by `hour`, else None.

    hour: `06:30`, UTC. now: time-zone aware. A night is done if it is done on every kind of GPU;
    its name is the date, as of `nightly` without --night. The first call that finds it late adds
    the notification event.
    """
    if f"{now:%H:%M}" < hour:
        return None
    night = f"{now:%F}"
    with database.session() as session:
        states = queries.night_states(session, name=night, suite=suite)
        unfinished = [row for row in states if row.state != "done"]
        if states and not unfinished:
            return None
        progress = ", ".join(f"{row.state} on {row.gpu}" for row in unfinished) or "never begun"
        state = f"night {night} of suite {suite} is not done at {hour} UTC: {progress}"
        add_late_night_event(session, night, suite, hour, state, at=now)
    return state
