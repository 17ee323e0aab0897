"""Insert accuracy records and the rows that they reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from flexq_bench.db.accuracy_records import AccuracyRecord
from flexq_bench.db.encoding import canonical
from flexq_bench.db.samples import pack
from flexq_bench.db.tables import AccuracyResult, AccuracySample
from flexq_bench.db.writer import Writer

_COPIED = tuple(
    name
    for name in (item.name for item in fields(AccuracyRecord))
    if name in AccuracyResult.__table__.columns and name != "created_at"
)


def add_accuracy(session: Session, records: Iterable[AccuracyRecord]) -> int:
    """Store records and return the number of new ones; stored uuids are left unchanged.

    Raises RecordError if a field can't be stored, ConflictError if another run has the idempotency
    key of a record's run.
    """
    writer = AccuracyWriter(session, Writer(session))
    for record in records:
        writer.add(canonical(record))
    return writer.added


class AccuracyWriter:
    """Inserts canonical accuracy records in the transaction of a Writer."""

    def __init__(self, session: Session, writer: Writer) -> None:
        self._session = session
        self._writer = writer
        self.added = 0

    def add(self, record: AccuracyRecord) -> None:
        """Store a record unless its uuid is stored. Raises ConflictError like Writer.run."""
        known = select(AccuracyResult.id).where(AccuracyResult.uuid == record.uuid)
        if self._session.scalar(known) is not None:
            return
        row = {name: getattr(record, name) for name in _COPIED}
        row |= self._writer.references(record)
        result_id = self._session.scalars(
            insert(AccuracyResult).values(row).returning(AccuracyResult.id)
        ).one()
        if record.values:
            packed = pack((record.values,))
            sample = {"accuracy_result_id": result_id, "count": packed.count, "data": packed.data}
            self._session.execute(insert(AccuracySample).values(sample))
        self.added += 1
