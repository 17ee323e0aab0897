"""One writer at a time, on either database.

Writers look a row up and insert it if it is not there. With the lock taken first, two processes
that add the same series do not collide, and none of them can wait for the other in a circle.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

# Any number that nobody else uses for an advisory lock in the same PostgreSQL database.
_ADVISORY_KEY = 0x666C657871  # "flexq"


def lock_for_writing(connection: Connection) -> None:
    """Hold the writer's lock until the transaction ends; again within it: no effect.

    Waits up to the database's timeout; the driver's error then becomes LockedError.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_KEY})
        return
    # Python's driver begins a transaction only at the first INSERT, too late for the look-up.
    driver_connection = connection.connection.driver_connection
    if driver_connection is not None and not driver_connection.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
