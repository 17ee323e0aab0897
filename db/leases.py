"""Leases: a row of work belongs to its holder until a time, and to anybody after it.

One rule for jobs, which workers hold, and for requests, which servers hold. A row is free if it is
queued, or if its lease has run out. Every call expects that the writer's lock is held.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Column, ColumnElement, FromClause, Table, bindparam, or_, update
from sqlalchemy.orm import Session

from db.tables import Job, Request

QUEUED = "queued"


@dataclass(frozen=True, slots=True)
class Leases:
    """The leases on the rows of a table, which has the columns state and lease_until.

    held: state of a row under a lease. holder: name of the column that says whose it is.
    """

    table: FromClause
    held: str
    holder: str

    def is_free(self, at: datetime) -> ColumnElement[bool]:
        """The condition that nobody holds a row at this time."""
        state, until = self._column("state"), self._column("lease_until")
        return or_(state == QUEUED, (state == self.held) & (until < at))

    def is_live(self, at: datetime) -> ColumnElement[bool]:
        """The condition that somebody holds a row at this time."""
        return (self._column("state") == self.held) & (self._column("lease_until") >= at)

    def claim(
        self, session: Session, holders: Mapping[int, str], *, until: datetime, **changes: Any
    ) -> None:
        """Lease free rows. holders: by id. changes: further columns to set."""
        if not holders:
            return
        statement = (
            update(self._table)
            .where(self._column("id") == bindparam("row"))
            .values(
                {
                    "state": self.held,
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
        """Extend the leases of these holders; False: they hold none.

        only: further conditions on the rows. changes: further columns to set.
        """
        statement = (
            update(self._table)
            .where(
                self._column(self.holder).in_(holders), self._column("state") == self.held, *only
            )
            .values({"lease_until": until, **changes})
        )
        return session.connection().execute(statement).rowcount > 0

    @property
    def _table(self) -> Table:
        assert isinstance(self.table, Table)
        return self.table

    def _column(self, name: str) -> Column[Any]:
        return self._table.columns[name]


JOB_LEASES = Leases(Job.__table__, held="leased", holder="worker")
REQUEST_LEASES = Leases(Request.__table__, held="running", holder="server")
