"""A server that stops answering, or that takes no writes for a while."""

from __future__ import annotations

import os
import signal
import time

import pytest
from sqlalchemy import text

from flexq_bench.db import silent_server
from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.engine import open_database
from flexq_bench.db.errors import (
    UNAVAILABLE,
    BusyError,
    DatabaseError,
    ReadOnlyError,
    StandbyError,
    UnreachableError,
)
from flexq_bench.db.store import begin_run


@pytest.fixture
def url(postgresql_template, make_url):
    made = make_url()
    if "://" not in made:
        pytest.skip("a server's")
    return made


def test_silent_server_is_logged_and_given_up(url, monkeypatch, caplog):
    monkeypatch.setattr(silent_server, "_LOG_INTERVAL_S", 0.3)
    with open_database(url, silence_s=1.0) as database:
        told = "no answer to a statement for 1 s"
        stopped = []

        def hang():
            with database.session() as session:
                stopped.append(session.scalar(text("SELECT pg_backend_pid()")))
                os.kill(stopped[0], signal.SIGSTOP)
                session.scalar(text("SELECT 1"))

        with pytest.raises(UnreachableError, match=told):
            hang()
        os.kill(stopped[0], signal.SIGCONT)
        assert "has not answered for" in caplog.text
        with database.session() as session:  # a connection of its own
            assert session.scalar(text("SELECT 1")) == 1


def test_frozen_writer_loses_its_lock(url, build):
    """It waits within its transaction for longer than a server may be silent."""
    with open_database(url, silence_s=0.3) as frozen, open_database(url) as other:

        def freeze():
            with frozen.session() as session:
                lock_for_writing(session.connection())
                with other.session() as another:
                    begin_run(another, build.a_run(), build.a_commit())
                session.scalar(text("SELECT 1"))

        with pytest.raises(BusyError):
            freeze()


def test_without_the_lock_a_writer_may_think(url):
    """As a command that reads, computes for minutes, and reads again."""
    with open_database(url, silence_s=0.1) as database, database.session() as session:
        session.scalar(text("SELECT 1"))
        time.sleep(0.3)
        assert session.scalar(text("SELECT 1")) == 1


def test_slow_server_is_waited_for(url):
    with open_database(url, silence_s=10.0) as database, database.session() as session:
        session.execute(text("SELECT pg_sleep(1)"))


def test_read_only_server_is_a_standby(url, build):
    database = open_database(url, read_only=True)
    with pytest.raises(StandbyError, match="is read-only"), database.session() as session:
        begin_run(session, build.a_run(), build.a_commit())
    database.close()
    assert issubclass(StandbyError, UNAVAILABLE)
    assert not issubclass(ReadOnlyError, UNAVAILABLE)


@pytest.mark.parametrize(
    "sqlstate", ["40001", "40P01", "53100", "53200", "53300", "57014", "25P03", "58030"]
)
def test_transaction_that_the_server_gives_up_can_be_repeated(url, sqlstate):
    with open_database(url) as database:
        with pytest.raises(BusyError), database.session() as session:
            session.execute(text(f"DO $$ BEGIN RAISE SQLSTATE '{sqlstate}'; END $$"))
        with database.session() as session:
            assert session.scalar(text("SELECT 1")) == 1
    assert issubclass(BusyError, UNAVAILABLE)


def test_violated_constraint_is_not_repeated(url):
    with open_database(url) as database, pytest.raises(DatabaseError) as caught:  # noqa: SIM117
        with database.session() as session:
            session.execute(text("DO $$ BEGIN RAISE SQLSTATE '23505'; END $$"))

    assert not isinstance(caught.value, UNAVAILABLE)
