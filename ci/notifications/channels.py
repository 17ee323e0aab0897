"""Sending one message to one receiver, through Apprise (github.com/caronc/apprise).

Where a receiver is, with its credentials, is an Apprise URL in an environment variable: `mailtos://`
(e-mail), `slack://`, `github://TOKEN@OWNER/REPOSITORY` (an issue; with `/issues/N` or `/pull/N` a
comment), and all others that Apprise knows. `https://` and `http://` are webhooks of our own: JSON,
signed with HMAC. Neither a URL nor what a library says of one is ever logged or stored.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ci.notifications.subscriptions import Subscription
from db.outbox import EventInfo
from flexq_bench.errors import InfrastructureError

if TYPE_CHECKING:
    from db.outbox import DeliveryRow

SIGNATURE = "X-FlexQ-Bench-Signature-256"
DELIVERY = "X-FlexQ-Bench-Delivery"
TIMEOUT_S = 20.0  # to connect, and to be answered
VERSION = 1  # of the webhook's JSON
_NOT_INSTALLED = "Apprise is not installed: pip install 'flexq-bench[notify]'"
_SENDERS = ("apprise", "requests", "requests_oauthlib", "urllib3", "http.client")
_TYPES = {"info": "info", "warning": "warning", "critical": "failure"}


class ChannelError(InfrastructureError):
    """A message was not taken. The message names no URL and no credential."""


def is_configured(one: Subscription, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process has the URL of the subscription's receiver."""
    return bool(environment.get(one.url_env))


def send(
    one: Subscription, delivery: DeliveryRow, environment: Mapping[str, str] = os.environ
) -> None:
    """Send a delivery to the receiver of its subscription. Raises ChannelError if it fails."""
    url = environment.get(one.url_env, "")
    if not url:
        raise ChannelError(f"{one.url_env} is not set: it has the URL of {one.name}")
    if url.startswith(("https://", "http://")):
        _post(url, _secret(one, environment), delivery)
    else:
        _through_apprise(url, one, delivery.event)


def payload(delivery: DeliveryRow) -> bytes:
    """The body of a webhook: one JSON object, UTF-8."""
    event = delivery.event
    told: dict[str, Any] = {
        "version": VERSION,
        "delivery": delivery.uuid,
        "kind": event.kind,
        "severity": event.severity,
        "subject": event.subject,
        "text": event.body,
        "kernels": list(event.kernels),
        "gpus": list(event.gpus),
        "created_at": event.created_at.isoformat(),
        "content": dict(event.content),
    }
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()


def signature(secret: str, body: bytes) -> str:
    """`sha256=` and the HMAC-SHA-256 (RFC 2104) of a body, 64 hexadecimal digits."""
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"


def _secret(one: Subscription, environment: Mapping[str, str]) -> str | None:
    if one.secret_env is None:
        return None
    secret = environment.get(one.secret_env)
    if not secret:
        raise ChannelError(f"{one.secret_env} is not set: it has the key that signs {one.name}")
    return secret


def _post(url: str, secret: str | None, delivery: DeliveryRow) -> None:
    try:
        import requests  # Apprise's own HTTP library
    except ModuleNotFoundError:
        raise ChannelError(_NOT_INSTALLED) from None
    body = payload(delivery)
    headers = {"Content-Type": "application/json", DELIVERY: delivery.uuid}
    if secret is not None:
        headers[SIGNATURE] = signature(secret, body)
    try:
        # A redirect would carry the signed body to whoever the receiver names.
        with _silent():
            answer = requests.post(
                url, data=body, headers=headers, timeout=TIMEOUT_S, allow_redirects=False
            )
    except (requests.RequestException, ValueError) as error:
        # Its text has the URL.
        raise ChannelError(f"the receiver can't be reached ({type(error).__name__})") from None
    if not 200 <= answer.status_code < 300:
        raise ChannelError(f"the receiver answered with status {answer.status_code}")


def _through_apprise(url: str, one: Subscription, event: EventInfo) -> None:
    try:
        import apprise
    except ModuleNotFoundError:
        raise ChannelError(_NOT_INSTALLED) from None
    with (
        _silent(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of its plugins, about Python's own modules
        sender = apprise.Apprise()
        if not sender.add(url):
            raise ChannelError(f"{one.url_env} holds no URL that Apprise knows")
        sent = sender.notify(
            title=event.subject,
            body=event.body or event.subject,
            notify_type=_TYPES[event.severity],
            body_format=apprise.NotifyFormat.TEXT,
        )
    if not sent:
        raise ChannelError(f"{one.name}'s service did not take it")


@contextmanager
def _silent() -> Iterator[None]:
    """Without log lines of the libraries that send: they hold URLs, and those hold credentials.

    By level: a logger that is disabled says no more, those below it do.
    """
    loggers = [logging.getLogger(name) for name in _SENDERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
