"""Write and read tuned kernel configurations, shared by all workers on a GPU model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.identity import fingerprint
from flexq_bench.db.tables import TuningChoice


@dataclass(frozen=True, slots=True)
class ChoiceInfo:
    """A tuned configuration. key: all it depends on as plain JSON, with the SKU under `gpu`."""

    key: Mapping[str, Any]
    config: Mapping[str, Any]


def add_choices(session: Session, choices: Iterable[ChoiceInfo], *, at: datetime) -> int:
    """Store choices with a new key and return their number; stored choices are kept."""
    new = {fingerprint(choice.key): choice for choice in choices}
    if not new:
        return 0
    lock_for_writing(session.connection())
    known = select(TuningChoice.key_hash).where(TuningChoice.key_hash.in_(list(new)))
    for stored in session.scalars(known):
        del new[stored]
    rows = [
        {
            "key_hash": key_hash,
            "gpu": choice.key["gpu"],
            "key": dict(choice.key),
            "config": dict(choice.config),
            "chosen_at": at,
        }
        for key_hash, choice in new.items()
    ]
    if rows:
        session.execute(insert(TuningChoice), rows)
    return len(rows)


def choices_of(session: Session, gpu: str, software: str) -> list[ChoiceInfo]:
    """Return the choices of a SKU for this software (sources, libraries), oldest first."""
    stored = session.execute(
        select(TuningChoice.key, TuningChoice.config)
        .where(TuningChoice.gpu == gpu)
        .order_by(TuningChoice.id)
    )
    return [ChoiceInfo(row.key, row.config) for row in stored if row.key["software"] == software]
