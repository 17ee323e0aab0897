"""Signs of life of a worker that measures in its own process: others see that it is there."""

from __future__ import annotations

import logging
import platform
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from db.clock import database_time
from db.engine import Database
from db.errors import DatabaseError
from db.fleet import Beat, WorkerInfo, beat, end_worker, register_worker
from flexq_bench.runs.worker import Worker

EVERY = timedelta(seconds=20)

log = logging.getLogger(__name__)


@contextmanager
def present(database: Database, worker: Worker, *, every: timedelta = EVERY) -> Iterator[None]:
    """Within the block the worker is registered and beats; at its end it has stopped.

    A beat that the database does not take is left out: the next one says the same. Raises
    DatabaseError if the worker can't be registered.
    """
    name = str(uuid.uuid4())
    info = WorkerInfo(name, platform.node(), worker.pid, worker.device, worker.environment)
    with database.session() as session:
        register_worker(session, info, at=database_time(session))
    ended = threading.Event()
    thread = threading.Thread(
        target=_beat_until, args=(database, name, every, ended), name="presence", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        try:
            with database.session() as session:
                end_worker(session, name, at=database_time(session))
        except DatabaseError as error:  # what ended the work matters more
            log.warning("the worker's end was not stored: %s", error)


def _beat_until(database: Database, name: str, every: timedelta, ended: threading.Event) -> None:
    sign = Beat(name, None, None, 0, 0.0)
    while not ended.wait(every.total_seconds()):
        try:
            with database.session() as session:
                now = database_time(session)
                beat(session, [sign], until=now + every, at=now)
        except DatabaseError as error:
            log.warning("no sign of life was stored: %s", error)
