"""Query for published values of papers."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from flexq_bench.db.queries.rows import columns_of, rows_of
from flexq_bench.db.reference_store import ReferenceInfo
from flexq_bench.db.tables import ReferenceValue


def reference_values(session: Session) -> list[ReferenceInfo]:
    """Return all stored published values, in the order of their file."""
    query = select(*columns_of(ReferenceInfo, ReferenceValue)).order_by(ReferenceValue.id)
    return rows_of(session, ReferenceInfo, query)
