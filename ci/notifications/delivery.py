"""Delivery of the outbox: assign events to subscriptions, send them, and retry failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from flexq_bench.ci.notifications import channels
from flexq_bench.ci.notifications.channels import ChannelError
from flexq_bench.ci.notifications.subscriptions import Subscription, Subscriptions
from flexq_bench.db.engine import Database
from flexq_bench.db.outbox import (
    DeliveryRow,
    address,
    claim,
    delivery_counts,
    events_to_address,
    mark_failed,
    mark_sent,
)

MIN_RETRY_DELAY = timedelta(minutes=1)  # after the first failure; each further one doubles it
MAX_RETRY_DELAY = timedelta(hours=6)
MAX_EVENT_AGE = timedelta(days=7)  # older events, from before a subscription, are not sent
# A claim without a result expires after this time, which is longer than a message may take.
CLAIM_DURATION = timedelta(seconds=2.5 * channels.DEADLINE_S)

Send = Callable[[Subscription, DeliveryRow], None]


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """Result of delivering the outbox.

    failures: by subscription, the reason of its last failure. waiting: deliveries still to be sent.
    unconfigured: subscriptions whose URL this process does not have. old: events that were too old
    to be sent.
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
) -> DeliveryResult:
    """Address new events and send due deliveries, oldest first; failed ones are retried later.

    Each event is sent to a subscription once, even by concurrent calls. A failing receiver is
    skipped until its next delivery is due; others are not affected.
    """
    old = _address(database, subscriptions, now())
    by_name = {subscription.name: subscription for subscription in subscriptions.entries}
    configured = [name for name, entry in by_name.items() if channels.is_configured(entry)]
    failures: dict[str, str] = {}
    sent = 0
    while True:
        names = [name for name in configured if name not in failures]
        with database.session() as session:
            delivery = (
                claim(session, at=now(), hold=CLAIM_DURATION, subscriptions=names)
                if names
                else None
            )
        if delivery is None:
            break
        try:
            send(by_name[delivery.subscription], delivery)
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
    unconfigured = tuple(name for name in by_name if name not in configured)
    return DeliveryResult(sent, failures, counts["waiting"] + counts["sending"], unconfigured, old)


def retry_after(attempts: int) -> timedelta:
    """Return the delay before the next attempt. attempts: failures before the latest one."""
    doublings = min(attempts, 20)
    return min(MIN_RETRY_DELAY * (1 << doublings), MAX_RETRY_DELAY)


def _address(database: Database, subscriptions: Subscriptions, at: datetime) -> int:
    old = 0
    with database.session() as session:
        for event_id, event in events_to_address(session):
            too_old = event.created_at < at - MAX_EVENT_AGE
            old += too_old
            names = [] if too_old else [entry.name for entry in subscriptions.of(event)]
            address(session, event_id, names, at=at)
    return old
