"""A nightly run that is not done by its hour."""

from __future__ import annotations

from datetime import datetime

from ci.notifications.events import tell_late_night
from db import queries
from db.engine import Database


def look_for_late_night(database: Database, suite: str, hour: str, *, now: datetime) -> str | None:
    """Say how far today's night of a suite is if its hour has passed and it is not done.

    hour: `06:30`, UTC. now: aware. None: it is done on every kind of GPU, or the hour is to come. A
    night is called by its date, as `nightly` does without --night. The first call that finds it
    late writes the event that tells people.
    """
    if f"{now:%H:%M}" < hour:
        return None
    night = f"{now:%F}"
    with database.session() as session:
        states = queries.night_states(session, name=night, suite=suite)
        waiting = [one for one in states if one.state != "done"]
        if states and not waiting:
            return None
        far = ", ".join(f"{one.state} on {one.gpu}" for one in waiting) or "never begun"
        state = f"night {night} of suite {suite} is not done at {hour} UTC: {far}"
        tell_late_night(session, night, suite, hour, state, at=now)
    return state
