"""Registration and heartbeats of a worker that measures in this process, for other processes."""

from __future__ import annotations

import logging
import platform
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from flexq_bench.db.dialects import database_time
from flexq_bench.db.engine import Database
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.fleet import Beat, WorkerInfo, beat, end_worker, register_worker
from flexq_bench.runs.worker import Worker

INTERVAL = timedelta(seconds=20)

log = logging.getLogger(__name__)


@contextmanager
def registered_worker(
    database: Database, worker: Worker, *, every: timedelta = INTERVAL
) -> Iterator[None]:
    """Register a worker and send heartbeats during the block; mark it as stopped at the end.

    A heartbeat that could not be stored is not repeated: the next one follows. Raises
    DatabaseError if the worker can't be registered.
    """
    name = str(uuid.uuid4())
    info = WorkerInfo(name, platform.node(), worker.pid, worker.device, worker.environment)
    with database.session() as session:
        register_worker(session, info, at=database_time(session))
    ended = threading.Event()
    thread = threading.Thread(
        target=_send_heartbeats, args=(database, name, every, ended), name="presence", daemon=True
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
        except DatabaseError as error:  # must not hide the exception that ended the block
            log.warning("the worker's end was not stored: %s", error)


def _send_heartbeats(
    database: Database, name: str, every: timedelta, ended: threading.Event
) -> None:
    heartbeat = Beat(name, None, None, 0, 0.0)
    while not ended.wait(every.total_seconds()):
        try:
            with database.session() as session:
                now = database_time(session)
                beat(session, [heartbeat], until=now + every, at=now)
        except DatabaseError as error:
            log.warning("no heartbeat was stored: %s", error)
