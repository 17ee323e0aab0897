"""Tables of the transactional outbox: events and their deliveries."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from flexq_bench.db.tables.base import Base


class Event(Base):
    """Event to notify of; written in the transaction of the data it reports."""

    __tablename__ = "event"
    __table_args__ = (Index(None, "addressed_at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)  # deduplicates events
    kind: Mapped[str]
    severity: Mapped[str]
    subject: Mapped[str]
    body: Mapped[str]  # plain text
    kernels: Mapped[list[str]] = mapped_column(JSON)  # affected labels; empty: none
    gpus: Mapped[list[str]] = mapped_column(JSON)  # affected SKUs; empty: none
    content: Mapped[dict[str, Any]] = mapped_column(JSON)  # machine-readable
    created_at: Mapped[datetime]
    addressed_at: Mapped[datetime | None]  # null: not yet matched with subscriptions


class Delivery(Base):
    """Delivery of an event to one subscription."""

    __tablename__ = "delivery"
    __table_args__ = (UniqueConstraint("event_id", "subscription"), Index(None, "state", "due_at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    event_id: Mapped[int] = mapped_column(ForeignKey("event.id"))
    subscription: Mapped[str]  # name; its address is not in the database
    state: Mapped[str]
    attempts: Mapped[int] = mapped_column(BigInteger)
    due_at: Mapped[datetime]  # earliest time of the next attempt; while sending: of another claim
    sent_at: Mapped[datetime | None]  # null: not yet
    detail: Mapped[str]  # error of the last attempt; empty: none failed
