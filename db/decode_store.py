"""Storing decode and serving records, with the rows that they refer to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from datetime import datetime

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from db.decode_records import DecodeRecord, ServingRecord
from db.encoding import canonical
from db.tables import DecodeResult, ServingResult
from db.writer import Writer

TABLES: dict[type, type[DecodeResult] | type[ServingResult]] = {
    DecodeRecord: DecodeResult,
    ServingRecord: ServingResult,
}
_REFERENCES = {"run", "commit", "device", "environment", "created_at", "schema_version"}


def add_decodes(session: Session, records: Iterable[DecodeRecord | ServingRecord]) -> int:
    """Store records in one go, and say how many are new; known ones change nothing.

    Raises RecordError if a field can't be stored, ConflictError if another run holds the
    idempotency key of a record's run.
    """
    writer = DecodeWriter(session, Writer(session))
    for record in records:
        writer.add(canonical(record))
    return writer.added


class DecodeWriter:
    """Adds canonical decode and serving records beside a Writer, within its transaction."""

    def __init__(self, session: Session, writer: Writer) -> None:
        self._session = session
        self._writer = writer
        self.added = 0

    def add(self, record: DecodeRecord | ServingRecord) -> None:
        """Store a record, if its uuid is not stored. Raises ConflictError as Writer.run."""
        table = TABLES[type(record)]
        if self._session.scalar(select(table.id).where(table.uuid == record.uuid)) is not None:
            return
        commit_id = self._writer.commit(record.commit)
        row = {name: getattr(record, name) for name in copied(type(record))} | {
            "run_id": self._writer.run(record.run, commit_id),
            "commit_id": commit_id,
            "device_id": self._writer.device(record.device),
            "environment_id": self._writer.environment(record.environment),
            "created_at": datetime.fromisoformat(record.created_at),
        }
        self._session.execute(insert(table).values(row))
        self.added += 1


def copied(kind: type[DecodeRecord | ServingRecord]) -> tuple[str, ...]:
    """The fields of a record that its row holds under the same name."""
    return tuple(f.name for f in fields(kind) if f.name not in _REFERENCES)
