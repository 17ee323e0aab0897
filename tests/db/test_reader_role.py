"""The database user of a read-only dashboard, made as docs/dashboard.md says."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
import streamlit as st
from sqlalchemy import create_engine, text
from streamlit.testing.v1 import AppTest

from flexq_bench.dashboard.database import current_database, write_alert
from flexq_bench.db import queries
from flexq_bench.db.decisions import open_alert
from flexq_bench.db.engine import open_database
from flexq_bench.db.errors import ReadOnlyError
from flexq_bench.db.store import add_record

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PAGE = Path(__file__).parents[2] / "docs" / "dashboard.md"


@pytest.fixture(scope="session")
def owned(postgresql_template, build):
    """URL of the owner of a PostgreSQL database with a result and an alert."""
    admin = create_engine(
        postgresql_template.format(database="postgres"), isolation_level="AUTOCOMMIT"
    )
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE for_readers TEMPLATE ours"))
    admin.dispose()
    url = postgresql_template.format(database="for_readers")
    with open_database(url) as database, database.session() as session:
        record = build.a_record()
        add_record(session, record)
        open_alert(session, "flexq", record.commit.sha, record.commit.sha, NOW)
    return url


@pytest.fixture(scope="session")
def reader(owned):
    """URL of the user that the documentation makes."""
    (statements,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.S)
    engine = create_engine(owned)
    with engine.begin() as connection:
        for statement in filter(None, map(str.strip, statements.split(";"))):
            connection.execute(text(statement))
    engine.dispose()
    return re.sub(r"//[^@/]*@", "//flexq_reader@", owned)


@pytest.fixture
def app_as_reader(reader, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_DB", reader)
    st.cache_resource.clear()
    yield
    current_database().close()
    st.cache_resource.clear()


def test_reader_role_reads_and_can_not_write(reader, build):
    with open_database(reader) as database:
        with database.session() as session:
            assert len(queries.runs(session)) == 1
        with (
            pytest.raises(ReadOnlyError, match="does not let this user write"),
            database.session() as session,
        ):
            add_record(session, build.a_record("another", m=8))
        for table in ("alert", "measurement", "request"):
            with pytest.raises(ReadOnlyError), database.session() as session:
                session.execute(text(f"DELETE FROM {table}"))


def test_user_reads_what_later_migrations_add(owned, reader):
    engine = create_engine(owned)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE added_later (id integer)"))
    engine.dispose()

    with open_database(reader) as database, database.session() as session:
        assert session.execute(text("SELECT * FROM added_later")).all() == []


@pytest.mark.parametrize("page", ["home", "alert", "history", "results"])
def test_pages_work_as_that_user(app_as_reader, one_scan_for_components, page):
    app = AppTest.from_string(
        f"from flexq_bench.dashboard.views.{page}.page import page\npage()", default_timeout=30
    ).run()

    assert not app.exception
    assert not app.error


def test_write_is_refused_for_the_reader_role(app_as_reader):
    with pytest.raises(ReadOnlyError):
        write_alert(1, "fixed", seen_events=1, person="Ada", note="")
