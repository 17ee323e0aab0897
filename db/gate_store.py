"""Insert gate records and the rows that they reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from flexq_bench.db.encoding import canonical
from flexq_bench.db.gate_records import GateRecord
from flexq_bench.db.tables import AccuracyGate
from flexq_bench.db.writer import Writer

_COPIED = (
    *("uuid", "model", "model_hash", "scheme", "base"),
    *("content_hash", "through", "reference", "reference_hash", "diagnosis"),
    *("policy", "policy_version", "policy_hash", "verdict", "exit_code"),
)


def add_gates(session: Session, records: Iterable[GateRecord]) -> int:
    """Store records and return the number of new ones; stored uuids are left unchanged.

    Raises RecordError if a field can't be stored, ConflictError if another run has the idempotency
    key of a record's run.
    """
    writer = GateWriter(session, Writer(session))
    for record in records:
        writer.add(canonical(record))
    return writer.added


class GateWriter:
    """Inserts canonical gate records in the transaction of a Writer."""

    def __init__(self, session: Session, writer: Writer) -> None:
        self._session = session
        self._writer = writer
        self.added = 0

    def add(self, record: GateRecord) -> None:
        """Store a record unless its uuid is stored. Raises ConflictError like Writer.run."""
        known = select(AccuracyGate.id).where(AccuracyGate.uuid == record.uuid)
        if self._session.scalar(known) is not None:
            return
        row = {name: getattr(record, name) for name in _COPIED}
        row |= self._writer.references(record)
        row["limits"] = [asdict(limit) for limit in record.limits]
        self._session.execute(insert(AccuracyGate).values(row))
        self.added += 1
