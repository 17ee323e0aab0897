"""Retry of database transactions during an outage of the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from flexq_bench.db.engine import Database, Session
from flexq_bench.db.errors import UNAVAILABLE
from flexq_bench.errors import InfrastructureError

LONGEST_S = 600.0  # longest outage, as in flexq_bench.fleet.timeouts
PAUSE_S = 1.0  # between two attempts
_WARNING_INTERVAL_S = 20.0

Value = TypeVar("Value")
log = logging.getLogger(__name__)


def through_outages(
    database: Database,
    work: Callable[[Session], Value],
    *,
    longest_s: float | None = None,
) -> Value:
    """Call `work` in its own transaction and return its result; retry during an outage.

    Waits up to longest_s seconds (None: LONGEST_S) and logs warnings. `work` may be called again
    although its transaction was committed, if the acknowledgement was lost. Raises
    InfrastructureError if the database stays unavailable.
    """
    longest_s = LONGEST_S if longest_s is None else longest_s
    started = last_warning = time.monotonic()
    while True:
        try:
            with database.session() as session:
                return work(session)
        except UNAVAILABLE as error:
            now = time.monotonic()
            if now - started > longest_s:
                raise InfrastructureError(
                    f"the database was away for {now - started:.0f} s ({error}): continue with "
                    "--resume when it is available"
                ) from error
            if last_warning == started or now - last_warning >= _WARNING_INTERVAL_S:
                last_warning = now
                log.warning("%s; results are kept in memory until then", error)
            time.sleep(PAUSE_S)
