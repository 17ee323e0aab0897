"""Send a message to a receiver, by a webhook or Apprise (github.com/caronc/apprise).

An environment variable has the URL of a receiver with its credentials: an Apprise URL such as
`mailtos://` (e-mail), `slack://` or `github://TOKEN@OWNER/REPOSITORY` (an issue; with `/issues/N`
or `/pull/N` a comment). `https://` and `http://` are webhooks, which get JSON signed with HMAC.
URLs, and library messages that may contain them, are never logged or stored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flexq_bench.ci.notifications.subscriptions import Subscription
from flexq_bench.db.outbox import EventInfo
from flexq_bench.errors import InfrastructureError

if TYPE_CHECKING:
    from flexq_bench.db.outbox import DeliveryRow

# Header names of Standard Webhooks (standardwebhooks.com); libraries of that name verify them.
DELIVERY, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
TIMEOUT_S = 20.0  # to connect, and between two parts of a response
DEADLINE_S = 2 * TIMEOUT_S  # of a whole message, because a response may come byte by byte
VERSION = 1  # of the webhook's JSON
_NOT_INSTALLED = "Apprise is not installed: pip install 'flexq-bench[notify]'"
_SENDERS = ("apprise", "requests", "requests_oauthlib", "urllib3", "http.client")
_TYPES = {"info": "info", "warning": "warning", "critical": "failure"}


class ChannelError(InfrastructureError):
    """A message could not be sent. The text contains no URL and no credential."""


def is_configured(subscription: Subscription, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the environment has the URL of the subscription's receiver."""
    return bool(_url(subscription, environment))


def send(
    subscription: Subscription, delivery: DeliveryRow, environment: Mapping[str, str] = os.environ
) -> None:
    """Send a delivery to the receiver of its subscription. Raises ChannelError if it fails."""
    url = _url(subscription, environment)
    if not url:
        raise ChannelError(
            f"{subscription.url_env} is not set: it must have the URL of {subscription.name}"
        )
    if url.lower().startswith(("https://", "http://")):
        secret = _secret(subscription, environment)
        _by_deadline(lambda: _post(url, secret, delivery))
    else:
        _by_deadline(lambda: _through_apprise(url, subscription, delivery.event))


def payload(delivery: DeliveryRow) -> bytes:
    """Return the body of a webhook request: one JSON object, UTF-8."""
    event = delivery.event
    values: dict[str, Any] = {
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
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()


def signature(secret: str, delivery: str, timestamp: int, body: bytes) -> str:
    """Return the signature of Standard Webhooks: `v1,` and a base64 HMAC-SHA-256 (RFC 2104).

    It covers the delivery's id and the time of sending, in seconds since 1970, so a receiver can
    refuse a message that is sent again. secret: any text; `whsec_` is followed by base64.
    """
    prefix, _, encoded = secret.partition("whsec_")
    key = base64.b64decode(encoded) if encoded and not prefix else secret.encode()
    signed = hmac.digest(key, b"%s.%d.%s" % (delivery.encode(), timestamp, body), hashlib.sha256)
    return f"v1,{base64.b64encode(signed).decode()}"


def _by_deadline(sends: Callable[[], None]) -> None:
    """Call a function that sends; raise ChannelError if it takes longer than DEADLINE_S.

    The libraries have no timeout for looking up a name, nor for a whole response.
    """
    raised: list[ChannelError] = []

    def call() -> None:
        try:
            sends()
        except ChannelError as error:
            raised.append(error)
        except Exception as error:  # of a library or its plugin; its text may contain the URL
            raised.append(ChannelError(f"sending failed ({type(error).__name__})"))

    # A daemon thread, so that a hanging call does not keep the process from ending.
    thread = threading.Thread(target=call, name="notification", daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if thread.is_alive():
        raise ChannelError(f"the receiver did not answer within {DEADLINE_S:g} s")
    if raised:
        raise raised[0]


def _secret(subscription: Subscription, environment: Mapping[str, str]) -> str | None:
    if subscription.secret_env is None:
        return None
    secret = environment.get(subscription.secret_env)
    if not secret:
        raise ChannelError(
            f"{subscription.secret_env} is not set: it must have the key that signs "
            f"{subscription.name}"
        )
    return secret


def _url(subscription: Subscription, environment: Mapping[str, str]) -> str:
    return environment.get(subscription.url_env, "").strip()


def _post(url: str, secret: str | None, delivery: DeliveryRow) -> None:
    try:
        import requests  # Apprise's own HTTP library
    except ModuleNotFoundError:
        raise ChannelError(_NOT_INSTALLED) from None
    body = payload(delivery)
    now = int(time.time())
    headers = {
        "Content-Type": "application/json",
        DELIVERY: delivery.uuid,
        TIMESTAMP: str(now),
    }
    if secret is not None:
        try:
            headers[SIGNATURE] = signature(secret, delivery.uuid, now, body)
        except ValueError:  # the text after whsec_ is no base64; its message could reveal the key
            raise ChannelError(
                "the key begins with whsec_ and is no base64: copy it again"
            ) from None
    try:
        # A redirect would send the signed body to another host. stream: the body of the response is
        # not read, because it may be endless.
        with (
            _suppressed_logs(),
            requests.post(
                url,
                data=body,
                headers=headers,
                timeout=TIMEOUT_S,
                allow_redirects=False,
                stream=True,
            ) as response,
        ):
            status = response.status_code
    except (requests.RequestException, ValueError) as error:
        # The error's text contains the URL.
        raise ChannelError(f"the receiver can't be reached ({type(error).__name__})") from None
    if not 200 <= status < 300:
        raise ChannelError(f"the receiver answered with status {status}")


def _through_apprise(url: str, subscription: Subscription, event: EventInfo) -> None:
    try:
        import apprise
    except ModuleNotFoundError:
        raise ChannelError(_NOT_INSTALLED) from None
    with (
        _suppressed_logs(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # Apprise plugins use deprecated modules
        sender = apprise.Apprise()
        if not sender.add(url):
            raise ChannelError(f"{subscription.url_env} has no URL that Apprise supports")
        sent = sender.notify(
            title=event.subject,
            body=event.body or event.subject,
            notify_type=_TYPES[event.severity],
            body_format=apprise.NotifyFormat.TEXT,
        )
    if not sent:
        raise ChannelError(f"the service of {subscription.name} rejected the message")


_suppressing = threading.Lock()
_suppressed: list[dict[str, int]] = []  # levels before each of the messages being sent


@contextmanager
def _suppressed_logs() -> Iterator[None]:
    """Suppress log lines of the sending libraries, which contain URLs with credentials.

    Sets the level: disabling a logger would not affect its children. Levels are restored when no
    message is being sent, including those beyond their deadline.
    """
    with _suppressing:
        _suppressed.append({name: logging.getLogger(name).level for name in _SENDERS})
        for name in _SENDERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        with _suppressing:
            # The first entry has the original levels; the others have ours.
            levels = _suppressed.pop()
            if not _suppressed:
                for name, level in levels.items():
                    logging.getLogger(name).setLevel(level)
