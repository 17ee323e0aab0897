"""A database that goes away for a while: who has something to write keeps it and tries again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from db.engine import Database, Session
from db.errors import AWAY
from flexq_bench.errors import InfrastructureError

LONGEST_S = 600.0  # to wait, as the fleet does
PAUSE_S = 1.0  # between two attempts
_SAY_S = 20.0  # between two lines about it

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)


def through_outages(
    database: Database,
    work: Callable[[Session], Answer],
    *,
    longest_s: float | None = None,
) -> Answer:
    """The answer of `work` in a transaction of its own, as soon as the database takes it.

    While the database is away it waits, up to longest_s seconds (None: LONGEST_S), and says so.
    `work` may be called again although its transaction was committed, where the acknowledgement was
    lost. Raises InfrastructureError if the database stays away.
    """
    longest_s = LONGEST_S if longest_s is None else longest_s
    begun = said = time.monotonic()
    while True:
        try:
            with database.session() as session:
                return work(session)
        except AWAY as error:
            now = time.monotonic()
            if now - begun > longest_s:
                raise InfrastructureError(
                    f"the database was away for {now - begun:.0f} s ({error}): go on with "
                    "--resume when it is back"
                ) from error
            if said == begun or now - said >= _SAY_S:
                said = now
                log.warning("%s; what is to be stored waits here meanwhile", error)
            time.sleep(PAUSE_S)
