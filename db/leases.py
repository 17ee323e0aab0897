"""Leases on rows: a holder has a row until the lease expires; then anybody may claim it.

The same rules apply to jobs (held by workers) and requests (held by servers). A row is free if it
is queued or its lease has expired. Every call requires the writer's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Column, ColumnElement, bindparam, or_, update
from sqlalchemy.orm import Session

from flexq_bench.db.tables import Job, Request

QUEUED = "queued"


@dataclass(frozen=True, slots=True)
class Leases:
    """Leases on the rows of a table with the columns state and lease_until.

    leased_state: state of a leased row. holder: name of the column with the holder.
    """

    table: Any
    leased_state: str
    holder: str

    def is_free(self, at: datetime) -> ColumnElement[bool]:
        """Return the condition that a row is free at this time."""
        state, until = self._column("state"), self._column("lease_until")
        return or_(state == QUEUED, (state == self.leased_state) & (until < at))

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
