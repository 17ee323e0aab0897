"""Leases on rows: a holder has a row until the lease expires; then anybody may claim it.

The same rules apply to jobs (held by workers) and requests (held by servers). A row is free if it
is queued, if its lease has expired, or if the lease ends much later than one that begins now: the
clock was set back since. Every call requires the writer's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Column, ColumnElement, bindparam, or_, update
from sqlalchemy.orm import Session

from flexq_bench.db.tables import Job, Request

QUEUED = "queued"
# The other states are final: done; quarantined (too many workers died on it); refused (the commits
# can't be compared); no-device (no GPU of the pool could run it; queued again when there is one).
OPEN_JOB_STATES = ("queued", "leased")
UNFINISHED_JOB_STATES = (*OPEN_JOB_STATES, "no-device")
MEASURE, COMPARE = "measure", "compare"  # kinds of jobs
LIVE_WORKER_STATES = ("idle", "measuring")
_MAX_LEASE_RATIO = 4  # holders may have other times than we have


def is_current(until: datetime | None, at: datetime, lease: timedelta) -> bool:
    """Return True if a lease is in force. lease: the duration of one that begins now."""
    return until is not None and at <= until <= at + _MAX_LEASE_RATIO * lease


@dataclass(frozen=True, slots=True)
class Leases:
    """Leases on the rows of a table with the columns state and lease_until.

    leased_state: state of a leased row. holder: name of the column with the holder.
    """

    table: Any
    leased_state: str
    holder: str

    def is_free(self, at: datetime, lease: timedelta) -> ColumnElement[bool]:
        """Return the condition that a row is free. lease: as of `is_current`."""
        state, until = self._column("state"), self._column("lease_until")
        ended = or_(until < at, until > at + _MAX_LEASE_RATIO * lease)
        return or_(state == QUEUED, (state == self.leased_state) & ended)

    def is_live(self, at: datetime) -> ColumnElement[bool]:
        """Return the condition that a row is leased at this time."""
        return (self._column("state") == self.leased_state) & (self._column("lease_until") >= at)

    def claim(
        self, session: Session, holders: Mapping[int, str], *, until: datetime, **changes: Any
    ) -> None:
        """Lease free rows. holders: row id -> holder. changes: further columns to set."""
        if not holders:
            return
        statement = (
            update(self.table)
            .where(self._column("id") == bindparam("row"))
            .values(
                {
                    "state": self.leased_state,
                    self.holder: bindparam("by"),
                    "lease_until": until,
                    **changes,
                }
            )
        )
        rows = [{"row": row, "by": holder} for row, holder in holders.items()]
        session.connection().execute(statement, rows)

    def renew(
        self,
        session: Session,
        holders: Collection[str],
        *only: ColumnElement[bool],
        until: datetime,
        **changes: Any,
    ) -> bool:
        """Extend the leases of these holders; return False if they have none.

        only: further conditions on the rows. changes: further columns to set.
        """
        statement = (
            update(self.table)
            .where(
                self._column(self.holder).in_(holders),
                self._column("state") == self.leased_state,
                *only,
            )
            .values({"lease_until": until, **changes})
        )
        return session.connection().execute(statement).rowcount > 0

    def _column(self, name: str) -> Column[Any]:
        column: Column[Any] = self.table.columns[name]
        return column


JOB_LEASES = Leases(Job.__table__, leased_state="leased", holder="worker")
REQUEST_LEASES = Leases(Request.__table__, leased_state="running", holder="server")
