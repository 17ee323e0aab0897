"""Insert decode and serving records and the rows that they reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.orm import Session

from flexq_bench.db.decode_records import DecodeRecord, ServingRecord
from flexq_bench.db.encoding import canonical
from flexq_bench.db.samples import pack
from flexq_bench.db.tables import DecodeResult, DecodeSample, ServingResult
from flexq_bench.db.writer import Writer

TABLES: dict[type, type[DecodeResult] | type[ServingResult]] = {
    DecodeRecord: DecodeResult,
    ServingRecord: ServingResult,
}
SAMPLES = "processes"  # field whose items are stored in decode_sample
_REFERENCES = {"run", "commit", "device", "environment", "created_at", "schema_version", SAMPLES}


def add_decodes(session: Session, records: Iterable[DecodeRecord | ServingRecord]) -> int:
    """Store records and return how many are new, or newer than their stored version.

    Raises RecordError if a field can't be stored, ConflictError if another run has the idempotency
    key of a record's run.
    """
    writer = DecodeWriter(session, Writer(session))
    for record in records:
        writer.add(canonical(record))
    return writer.added


class DecodeWriter:
    """Inserts canonical decode and serving records in the transaction of a Writer."""

    def __init__(self, session: Session, writer: Writer) -> None:
        self._session = session
        self._writer = writer
        self.added = 0

    def add(self, record: DecodeRecord | ServingRecord) -> None:
        """Store a record unless its uuid is stored with an equal or later created_at.

        A resumed run writes its records again with the new measurements. Raises ConflictError like
        Writer.run.
        """
        table = TABLES[type(record)]
        created_at = datetime.fromisoformat(record.created_at)
        known = self._session.execute(
            select(table.id, table.created_at).where(table.uuid == record.uuid)
        ).one_or_none()
        if known is not None and known.created_at >= created_at:
            return
        row = {name: getattr(record, name) for name in copied_fields(type(record))}
        row |= self._writer.references(record)
        if known is None:
            result_id = self._session.scalars(insert(table).values(row).returning(table.id)).one()
        else:
            result_id = known.id
            self._session.execute(update(table).where(table.id == result_id).values(row))
        if isinstance(record, DecodeRecord):
            self._replace_samples(result_id, record)
        self.added += 1

    def _replace_samples(self, result_id: int, record: DecodeRecord) -> None:
        same_result = DecodeSample.decode_result_id == result_id
        self._session.execute(delete(DecodeSample).where(same_result))
        for process in record.processes:
            packed = pack((process.step_ms,))
            row: dict[str, Any] = {f.name: getattr(process, f.name) for f in fields(process)}
            del row["step_ms"]
            row |= {"decode_result_id": result_id, "count": packed.count, "data": packed.data}
            self._session.execute(insert(DecodeSample).values(row))


def copied_fields(kind: type[DecodeRecord | ServingRecord]) -> tuple[str, ...]:
    """Return the fields of a record that are columns of the same name."""
    return tuple(f.name for f in fields(kind) if f.name not in _REFERENCES)
