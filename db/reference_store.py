"""Write published numbers of papers. The table is a copy of a file in the package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.identity import fingerprint
from flexq_bench.db.tables import ReferenceValue

_NOT_IN_KEY = ("value", "note")


@dataclass(frozen=True, slots=True)
class ReferenceInfo:
    """One published number; fields and empty values as in db.tables.ReferenceValue."""

    source: str
    source_table: str
    kernel: str
    metric: str
    value: float
    unit: str
    baseline: str = ""
    model: str = ""
    layer: str = ""
    m: int | None = None
    n: int | None = None
    k: int | None = None
    suite: str = ""
    task: str = ""
    bound: str = ""
    hardware: str = ""
    note: str = ""


def store_reference_values(session: Session, values: Iterable[ReferenceInfo]) -> bool:
    """Replace the stored values by these; return False if they are equal already.

    Raises ValueError if two values have the same key (all fields except value and note).
    """
    rows: dict[str, dict[str, Any]] = {}
    for info in values:
        row = asdict(info)
        key = fingerprint({name: row[name] for name in row if name not in _NOT_IN_KEY})
        if key in rows:
            raise ValueError(f"two published values for {info}")
        rows[key] = row
    if _stored(session) == rows:
        return False
    lock_for_writing(session.connection())
    session.execute(delete(ReferenceValue))
    if rows:
        session.execute(
            insert(ReferenceValue), [{"fingerprint": key} | row for key, row in rows.items()]
        )
    return True


def _stored(session: Session) -> dict[str, dict[str, Any]]:
    columns = [c for c in ReferenceValue.__table__.columns if c.name != "id"]
    rows = (dict(row) for row in session.execute(select(*columns)).mappings())
    return {row.pop("fingerprint"): row for row in rows}
