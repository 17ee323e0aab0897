"""A PostgreSQL connection that does not wait for ever for a server that has stopped answering."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from typing import Any

import psycopg

_SAY_S = 20.0  # between two lines on a server that is silent

log = logging.getLogger(__name__)


def patient_connection(name: str, silence_s: float) -> type[psycopg.Connection[Any]]:
    """A class of connections that give up on a statement that has no answer for so many seconds.

    name: of the database, as messages have it. What gives up is an OperationalError, and the
    connection is closed: nobody knows what became of the statement.
    """

    class PatientConnection(psycopg.Connection[Any]):
        def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return super().wait(_limited(gen, name, silence_s), *arguments, **options)
            except psycopg.OperationalError as error:
                if isinstance(error, SilentServerError):
                    self.pgconn.finish()
                raise

    return PatientConnection


class SilentServerError(psycopg.OperationalError):
    """The server has not answered a statement for too long."""


def _limited(gen: Any, name: str, silence_s: float) -> Generator[Any, Any, Any]:
    """The generator of a statement, asked every tenth of a second whether it goes on."""
    begun = said = time.monotonic()
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            now = time.monotonic()
            if ready:
                begun = said = now
            elif now - begun > silence_s:
                raise SilentServerError(f"no answer to a statement for {now - begun:.0f} s")
            elif now - said > _SAY_S:
                said = now
                log.warning("%s has not answered for %.0f s", name, now - begun)
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value
