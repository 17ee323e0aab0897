"""The outbox: events, written with what they tell of, and their deliveries, sent later.

A delivery is sent by whoever claims it: until then it is due, while it is sent others leave it, and
if the sender dies, it is due again. A receiver that takes a message and does not say so gets it
again, under the same uuid.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from db.locking import lock_for_writing
from db.tables import Delivery, Event

EVENT_KINDS = (
    "alert",  # something got worse
    "improvement",
    "gate",  # a gate did not pass
    "nightly",  # a nightly run is broken, or late
    "digest",  # what a night came to
    "test",  # notify --test
)
SEVERITIES = ("info", "warning", "critical")
DELIVERY_STATES = ("waiting", "sending", "sent")


@dataclass(frozen=True, slots=True)
class EventInfo:
    """Something to tell. key: what it is about; the same is told once.

    body: plain text. kernels: labels, gpus: SKUs that it is about; empty: about none in particular.
    content: for machines.
    """

    key: str
    kind: str  # of EVENT_KINDS
    severity: str  # of SEVERITIES
    subject: str
    body: str
    created_at: datetime
    kernels: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeliveryRow:
    """A delivery with its event. attempts: those before this one."""

    uuid: str
    subscription: str
    state: str
    attempts: int
    due_at: datetime
    sent_at: datetime | None  # None: not yet
    detail: str  # why the last attempt failed; empty: none did
    event: EventInfo


def add_event(session: Session, event: EventInfo) -> bool:
    """Store an event; False: one of its key is stored, nothing changed."""
    lock_for_writing(session.connection())
    if session.scalar(select(Event.id).where(Event.key == event.key)) is not None:
        return False
    row = {name: getattr(event, name) for name in EventInfo.__slots__}
    row |= {"kernels": list(event.kernels), "gpus": list(event.gpus)}
    session.execute(insert(Event).values(row | {"content": dict(event.content)}))
    return True


def events_to_address(session: Session) -> list[tuple[int, EventInfo]]:
    """Events of which nobody has looked yet who is to be told, with their ids, oldest first."""
    query = select(Event).where(Event.addressed_at.is_(None)).order_by(Event.id)
    return [(row.id, _event(row)) for row in session.scalars(query)]


def address(session: Session, event_id: int, subscriptions: Iterable[str], *, at: datetime) -> int:
    """Put an event on its way to subscriptions, by name; how many deliveries that is.

    Once: an event that was addressed before gets no more of them.
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
    """Take the delivery that has been due longest, for `hold`; None: nothing is due.

    subscriptions: only of these; where another one leads, this process does not know. Whoever
    claims it ends with `mark_sent` or `mark_failed`; who does neither in time loses it to the next.
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
    claimed = _delivery(delivery, event)
    session.execute(
        update(Delivery)
        .where(Delivery.id == delivery.id)
        .values(state="sending", due_at=at + hold, attempts=Delivery.attempts + 1)
    )
    return claimed


def mark_sent(session: Session, delivery_uuid: str, *, at: datetime) -> None:
    """The receiver has taken it."""
    lock_for_writing(session.connection())
    session.execute(
        update(Delivery)
        .where(Delivery.uuid == delivery_uuid)
        .values(state="sent", sent_at=at, detail="")
    )


def mark_failed(session: Session, delivery_uuid: str, detail: str, *, due_at: datetime) -> None:
    """The receiver has not taken it: it is due again then, and so is all that waits for it."""
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


def undelivered(session: Session) -> list[DeliveryRow]:
    """Deliveries that no receiver has taken, those that are due longest first."""
    query = (
        select(Delivery, Event)
        .join(Event, Delivery.event_id == Event.id)
        .where(Delivery.state != "sent")
        .order_by(Delivery.due_at, Delivery.id)
    )
    return [_delivery(delivery, event) for delivery, event in session.execute(query)]


def delivery_counts(session: Session) -> dict[str, int]:
    """Count the deliveries in each state."""
    query = select(Delivery.state, func.count()).group_by(Delivery.state)
    counted = {row[0]: int(row[1]) for row in session.execute(query)}
    return {state: counted.get(state, 0) for state in DELIVERY_STATES}


def _delivery(row: Delivery, event: Event) -> DeliveryRow:
    return DeliveryRow(
        row.uuid,
        row.subscription,
        row.state,
        row.attempts,
        row.due_at,
        row.sent_at,
        row.detail,
        _event(event),
    )


def _event(row: Event) -> EventInfo:
    return EventInfo(
        row.key,
        row.kind,
        row.severity,
        row.subject,
        row.body,
        row.created_at,
        tuple(row.kernels),
        tuple(row.gpus),
        row.content,
    )
