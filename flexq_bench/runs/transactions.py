"""Database transactions that are repeated during an outage of the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from flexq_bench.db.engine import Database, Session
from flexq_bench.db.errors import UNAVAILABLE
from flexq_bench.errors import InfrastructureError

MAX_OUTAGE_S = 600.0
RETRY_INTERVAL_S = 1.0
_FIRST_PAUSE_S = 0.05  # a deadlock or a serialization failure is over at once
_WARNING_INTERVAL_S = 20.0

Value = TypeVar("Value")
log = logging.getLogger(__name__)


def retry_pause(outage_s: float) -> float:
    """Return the seconds until the next attempt: as many as the outage has lasted, at most 1."""
    return min(RETRY_INTERVAL_S, max(_FIRST_PAUSE_S, outage_s))


def run_transaction(
    database: Database,
    work: Callable[[Session], Value],
    *,
    max_outage_s: float | None = None,
) -> Value:
    """Call `work` in its own transaction and return its result; retry during an outage.

    Logs warnings. max_outage_s None: MAX_OUTAGE_S. `work` may be called again although its
    transaction was committed, if the acknowledgement was lost. Raises InfrastructureError if the
    database stays unavailable.
    """
    max_outage_s = MAX_OUTAGE_S if max_outage_s is None else max_outage_s
    started = last_warning = time.monotonic()
    while True:
        try:
            with database.session() as session:
                return work(session)
        except UNAVAILABLE as error:
            now = time.monotonic()
            if now - started > max_outage_s:
                raise InfrastructureError(
                    f"the database was away for {now - started:.0f} s ({error}): continue with "
                    "--resume when it is available"
                ) from error
            if last_warning == started or now - last_warning >= _WARNING_INTERVAL_S:
                last_warning = now
                log.warning("%s; results are kept in memory until then", error)
            time.sleep(retry_pause(now - started))
