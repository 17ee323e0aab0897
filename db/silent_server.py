"""PostgreSQL connection with a timeout for servers that stop responding."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from typing import Any

import psycopg

_LOG_INTERVAL_S = 20.0  # between two warnings about a silent server

log = logging.getLogger(__name__)


def connection_with_timeout(name: str, silence_s: float) -> type[psycopg.Connection[Any]]:
    """Return a connection class that raises if the server is silent for `silence_s` seconds.

    name: of the database, for messages. It raises SilentServerError and closes the connection:
    the outcome of the statement is unknown.
    """

    class ConnectionWithTimeout(psycopg.Connection[Any]):
        def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return super().wait(_with_timeout(gen, name, silence_s), *arguments, **options)
            except psycopg.OperationalError as error:
                if isinstance(error, SilentServerError):
                    self.pgconn.finish()
                raise

    return ConnectionWithTimeout


class SilentServerError(psycopg.OperationalError):
    """The server has not answered a statement for too long."""


def _with_timeout(gen: Any, name: str, silence_s: float) -> Generator[Any, Any, Any]:
    """Wrap psycopg's wait generator, which is resumed every 0.1 s, with the timeout."""
    last_ready = last_logged = time.monotonic()
    try:
        wait_for = next(gen)
        while True:
            ready = yield wait_for
            now = time.monotonic()
            if ready:
                last_ready = last_logged = now
            elif now - last_ready > silence_s:
                raise SilentServerError(f"no answer to a statement for {now - last_ready:.0f} s")
            elif now - last_logged > _LOG_INTERVAL_S:
                last_logged = now
                log.warning("%s has not answered for %.0f s", name, now - last_ready)
            wait_for = gen.send(ready)
    except StopIteration as end:
        return end.value
