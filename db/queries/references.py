"""Query for published values of papers."""

from __future__ import annotations

from dataclasses import fields

from sqlalchemy import select
from sqlalchemy.orm import Session

from flexq_bench.db.reference_store import ReferenceInfo
from flexq_bench.db.tables import ReferenceValue


def reference_values(session: Session) -> list[ReferenceInfo]:
    """Return all stored published values, in the order of their file."""
    columns = [ReferenceValue.__table__.columns[field.name] for field in fields(ReferenceInfo)]
    query = select(*columns).order_by(ReferenceValue.id)
    return [ReferenceInfo(**row) for row in session.execute(query).mappings()]
