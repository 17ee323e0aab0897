"""Emptying the outbox: who is to be told, and telling them, again and again until they take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ci.notifications import channels
from ci.notifications.channels import ChannelError
from ci.notifications.subscriptions import Subscription, Subscriptions
from db.engine import Database
from db.outbox import (
    DeliveryRow,
    address,
    claim,
    delivery_counts,
    events_to_address,
    mark_failed,
    mark_sent,
)

FIRST_RETRY = timedelta(minutes=1)  # after the first failure; each further one doubles it
LONGEST_RETRY = timedelta(hours=6)
OLDEST = timedelta(days=7)  # events from before somebody subscribed are no news
# A sender that has not said how it went by then is taken for dead: longer than a receiver may take.
HOLD = timedelta(seconds=5 * channels.TIMEOUT_S)

Send = Callable[[Subscription, DeliveryRow], None]


@dataclass(frozen=True, slots=True)
class Sent:
    """Result of delivering the outbox.

    failures: by subscription, why its last delivery failed. waiting: deliveries that are still to
    be sent. unconfigured: subscriptions whose URL this process does not have. old: events that were
    too old to be sent.
    """

    sent: int
    failures: dict[str, str]
    waiting: int
    unconfigured: tuple[str, ...] = ()
    old: int = 0


def deliver(
    database: Database,
    subscriptions: Subscriptions,
    *,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    send: Send = channels.send,
) -> Sent:
    """Address new events and send what is due, the longest due first; what fails is due later.

    Each event goes to a subscription once, whoever calls this and however often. A receiver that
    fails is left until its next delivery is due, and stops no other.
    """
    old = _address(database, subscriptions, now())
    known = {one.name: one for one in subscriptions.entries}
    able = [name for name, one in known.items() if channels.is_configured(one)]
    failures: dict[str, str] = {}
    sent = 0
    while True:
        names = [name for name in able if name not in failures]
        with database.session() as session:
            delivery = claim(session, at=now(), hold=HOLD, subscriptions=names) if names else None
        if delivery is None:
            break
        try:
            send(known[delivery.subscription], delivery)
        except ChannelError as error:
            failures[delivery.subscription] = str(error)
            with database.session() as session:
                due = now() + retry_after(delivery.attempts)
                mark_failed(session, delivery.uuid, str(error), due_at=due)
        else:
            sent += 1
            with database.session() as session:
                mark_sent(session, delivery.uuid, at=now())
    with database.session() as session:
        counts = delivery_counts(session)
    unable = tuple(name for name in known if name not in able)
    return Sent(sent, failures, counts["waiting"] + counts["sending"], unable, old)


def retry_after(attempts: int) -> timedelta:
    """Return the delay before the next attempt, after a failure that `attempts` others preceded."""
    doublings = min(attempts, 20)
    return min(FIRST_RETRY * (1 << doublings), LONGEST_RETRY)


def _address(database: Database, subscriptions: Subscriptions, at: datetime) -> int:
    old = 0
    with database.session() as session:
        for event_id, event in events_to_address(session):
            too_old = event.created_at < at - OLDEST
            old += too_old
            names = [] if too_old else [one.name for one in subscriptions.of(event)]
            address(session, event_id, names, at=at)
    return old
