"""The clock that leases go by: the database's, which all hosts share."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import text
from sqlalchemy.orm import Session


def database_time(session: Session) -> datetime:
    """The time now, in UTC: a server's, also where this host's clock is wrong.

    A SQLite file has no clock but that of the host, which all that open it share.
    """
    if session.connection().dialect.name != "postgresql":
        return datetime.now(UTC)
    # Not now(), which is when the transaction began: it may have waited for the writer's lock.
    moment: datetime = session.scalars(text("SELECT clock_timestamp()")).one()
    return moment.astimezone(UTC)
