"""Writer's lock: one writer at a time, on SQLite and PostgreSQL.

Writers select a row and insert it if it is missing. Taking the lock first prevents duplicate
inserts of the same series by two processes, and deadlocks.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

# Arbitrary; must not be used for another advisory lock in the same PostgreSQL database.
_ADVISORY_KEY = 0x666C657871  # "flexq"


def lock_for_writing(connection: Connection) -> None:
    """Acquire the writer's lock until the transaction ends; no effect if it is already held.

    Waits up to the database's timeout; the driver's error then becomes LockedError.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_KEY})
        return
    # Python's driver begins a transaction only at the first INSERT: too late for the SELECT before.
    driver_connection = connection.connection.driver_connection
    if driver_connection is not None and not driver_connection.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
