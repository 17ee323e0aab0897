"""Clock for leases: the database server's, common to all hosts."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import text
from sqlalchemy.orm import Session


def database_time(session: Session) -> datetime:
    """Return the current UTC time of the database server, independent of this host's clock.

    For a SQLite file it is the clock of the host, which all its users share.
    """
    if session.connection().dialect.name != "postgresql":
        return datetime.now(UTC)
    # now() would return the start of the transaction, which may have waited for the writer's lock.
    moment: datetime = session.scalars(text("SELECT clock_timestamp()")).one()
    return moment.astimezone(UTC)
