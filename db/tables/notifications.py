"""The outbox: what there is to say, and who is still to be told."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.tables.base import Base


class Event(Base):
    """Something that people may want to be told; written with what it is about."""

    __tablename__ = "event"
    __table_args__ = (Index(None, "addressed_at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)  # what it is about: the same is said once
    kind: Mapped[str]
    severity: Mapped[str]
    subject: Mapped[str]
    body: Mapped[str]  # plain text, lines
    kernels: Mapped[list[str]] = mapped_column(JSON)  # labels; empty: it is about no kernel
    gpus: Mapped[list[str]] = mapped_column(JSON)  # SKUs; empty: it is about none
    content: Mapped[dict[str, Any]] = mapped_column(JSON)  # for machines
    created_at: Mapped[datetime]
    addressed_at: Mapped[datetime | None]  # null: nobody has looked yet who is to be told


class Delivery(Base):
    """An event on its way to one subscription."""

    __tablename__ = "delivery"
    __table_args__ = (UniqueConstraint("event_id", "subscription"), Index(None, "state", "due_at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    event_id: Mapped[int] = mapped_column(ForeignKey("event.id"))
    subscription: Mapped[str]  # its name; where it leads is in no database
    state: Mapped[str]
    attempts: Mapped[int] = mapped_column(BigInteger)
    due_at: Mapped[datetime]  # not before; while it is being sent: others leave it until then
    sent_at: Mapped[datetime | None]  # null: not yet
    detail: Mapped[str]  # why the last attempt failed; empty: none did
