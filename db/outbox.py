"""Transactional outbox: events, stored with the data they report, and deliveries, sent later.

A delivery is sent by the process that claims it; no other process can claim it meanwhile. If that
process dies, the delivery becomes due again. A receiver that accepts a message without confirming
it receives the message again, with the same uuid.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.tables import Delivery, Event

EVENT_KINDS = (
    "alert",  # a regression
    "improvement",
    "gate",  # a gate did not pass
    "nightly",  # a nightly run failed, or is late
    "digest",  # summary of a nightly run
    "test",  # notify --test
)
SEVERITIES = ("info", "warning", "critical")
DELIVERY_STATES = ("waiting", "sending", "sent")


@dataclass(frozen=True, slots=True)
class EventInfo:
    """Event to notify of. key: unique; an event with a stored key is not stored again.

    body: plain text. kernels: affected labels; gpus: affected SKUs; both may be empty. content:
    machine-readable JSON.
    """

    key: str
    kind: str  # one of EVENT_KINDS
    severity: str  # one of SEVERITIES
    subject: str
    body: str
    created_at: datetime
    kernels: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeliveryRow:
    """A delivery with its event. attempts: number of earlier attempts."""

    uuid: str
    subscription: str
    state: str
    attempts: int
    due_at: datetime
    sent_at: datetime | None  # None: not yet
    detail: str  # error of the last attempt; empty: none failed
    event: EventInfo


def add_event(session: Session, event: EventInfo) -> bool:
    """Store an event; return False if its key is stored."""
    lock_for_writing(session.connection())
    if session.scalar(select(Event.id).where(Event.key == event.key)) is not None:
        return False
    row = {name: getattr(event, name) for name in EventInfo.__slots__}
    row |= {"kernels": list(event.kernels), "gpus": list(event.gpus)}
    session.execute(insert(Event).values(row | {"content": dict(event.content)}))
    return True


def events_to_address(session: Session) -> list[tuple[int, EventInfo]]:
    """Return events that were not yet matched with subscriptions, with their ids, oldest first."""
    query = select(Event).where(Event.addressed_at.is_(None)).order_by(Event.id)
    return [(row.id, _event(row)) for row in session.scalars(query)]


def address(session: Session, event_id: int, subscriptions: Iterable[str], *, at: datetime) -> int:
    """Create the deliveries of an event to subscriptions, by name; return their number.

    No effect on an event that was addressed before.
    """
    lock_for_writing(session.connection())
    new = session.execute(
        update(Event)
        .where(Event.id == event_id, Event.addressed_at.is_(None))
        .values(addressed_at=at)
        .returning(Event.id)
    )
    if new.first() is None:
        return 0
    rows = [
        {
            "uuid": str(uuid.uuid4()),
            "event_id": event_id,
            "subscription": name,
            "state": "waiting",
            "attempts": 0,
            "due_at": at,
            "detail": "",
        }
        for name in dict.fromkeys(subscriptions)
    ]
    if rows:
        session.execute(insert(Delivery), rows)
    return len(rows)


def claim(
    session: Session, *, at: datetime, hold: timedelta, subscriptions: Sequence[str]
) -> DeliveryRow | None:
    """Claim the delivery that has been due longest, for `hold`; None: nothing is due.

    subscriptions: those that this process can send to. The caller must call `mark_sent` or
    `mark_failed` within `hold`; afterwards another process may claim the delivery.
    """
    lock_for_writing(session.connection())
    query = (
        select(Delivery, Event)
        .join(Event, Delivery.event_id == Event.id)
        .where(
            Delivery.state != "sent",
            Delivery.due_at <= at,
            Delivery.subscription.in_(list(subscriptions)),
        )
        .order_by(Delivery.due_at, Delivery.id)
        .limit(1)
    )
    row = session.execute(query).first()
    if row is None:
        return None
    delivery, event = row
    before = {name: getattr(delivery, name) for name in DeliveryRow.__slots__ if name != "event"}
    claimed = DeliveryRow(**before, event=_event(event))
    session.execute(
        update(Delivery)
        .where(Delivery.id == delivery.id)
        .values(state="sending", due_at=at + hold, attempts=Delivery.attempts + 1)
    )
    return claimed


def mark_sent(session: Session, delivery_uuid: str, *, at: datetime) -> None:
    """Mark a delivery as accepted by the receiver."""
    lock_for_writing(session.connection())
    session.execute(
        update(Delivery)
        .where(Delivery.uuid == delivery_uuid)
        .values(state="sent", sent_at=at, detail="")
    )


def mark_failed(session: Session, delivery_uuid: str, detail: str, *, due_at: datetime) -> None:
    """Schedule a failed delivery, and others that wait for its subscription, for `due_at`."""
    lock_for_writing(session.connection())
    session.execute(
        update(Delivery)
        .where(Delivery.uuid == delivery_uuid, Delivery.state != "sent")
        .values(state="waiting", detail=detail, due_at=due_at)
    )
    name = select(Delivery.subscription).where(Delivery.uuid == delivery_uuid).scalar_subquery()
    session.execute(
        update(Delivery)
        .where(Delivery.subscription == name, Delivery.state == "waiting", Delivery.due_at < due_at)
        .values(due_at=due_at)
    )


def delivery_counts(session: Session) -> dict[str, int]:
    """Count the deliveries in each state."""
    query = select(Delivery.state, func.count()).group_by(Delivery.state)
    counted = {row[0]: int(row[1]) for row in session.execute(query)}
    return {state: counted.get(state, 0) for state in DELIVERY_STATES}


def _event(row: Event) -> EventInfo:
    values = {name: getattr(row, name) for name in EventInfo.__slots__}
    return EventInfo(**values | {"kernels": tuple(row.kernels), "gpus": tuple(row.gpus)})
