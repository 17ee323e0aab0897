from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from flexq_bench.db import queries
from flexq_bench.db.engine import network_file_system, open_database
from flexq_bench.db.errors import (
    LockedError,
    MissingDatabaseError,
    MissingDriverError,
    NotADatabaseError,
    ReadOnlyError,
    RecordError,
    UnknownSchemeError,
    UnreachableError,
)
from flexq_bench.db.records import Record
from flexq_bench.db.store import add_record
from flexq_bench.db.urls import ENVIRONMENT_VARIABLE, default_path

NOBODY = 65534


@pytest.fixture
def path(tmp_path):
    return tmp_path / "db.sqlite"


@pytest.fixture
def unprivileged(tmp_path):
    """Root may write everything: be nobody for a while, as a user with no right to the files."""
    if os.geteuid() != 0:
        yield
        return
    # Folders on the way are private to the user who runs the tests.
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


def test_missing_file_is_created_with_folder_and_tables(tmp_path, build):
    path = tmp_path / "a folder" / "100%" / "db.sqlite"

    with open_database(str(path)) as database:
        with database.session() as session:
            add_record(session, build.a_record())
        assert database.url == str(path)

    with open_database(f"sqlite:///{path}") as database, database.session() as session:
        assert list(queries.stored_records(session, Record)) == [build.a_record()]


def test_sqlite_uses_wal_and_foreign_keys(path):
    with open_database(str(path)) as database, database.session() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(text("PRAGMA foreign_keys")) == 1


def test_default_database_is_from_the_environment_or_user_folder(path, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    with open_database() as database:
        assert database.path == path

    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    with open_database() as database:
        assert database.path == default_path()
    assert default_path() == tmp_path / "data" / "flexq-bench" / "flexq-bench.sqlite"


def test_missing_file_is_not_created_for_a_reader(path):
    for options in ({"read_only": True}, {"create": False}):
        with pytest.raises(MissingDatabaseError, match=r"no database at .*db\.sqlite: measure"):
            open_database(str(path), **options)
    assert not path.exists()


def test_session_that_raises_leaves_nothing(path, build):
    with open_database(str(path)) as database:
        with pytest.raises(RecordError), database.session() as session:
            add_record(session, build.a_record()) and add_record(session, build.a_record(m=0))
        with database.session() as session:
            assert list(queries.stored_records(session, Record)) == []


@pytest.mark.parametrize("content", ["hello", "hello, this is a text file\n" * 1000])
@pytest.mark.parametrize("read_only", [False, True])
def test_file_that_is_no_database_is_refused_unchanged(path, content, read_only):
    path.write_text(content)

    with pytest.raises(NotADatabaseError, match=r"db\.sqlite is not a SQLite database: name"):
        open_database(str(path), read_only=read_only)

    assert path.read_text() == content


def test_database_of_another_program_is_refused_unchanged(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipe (id INTEGER)")
    connection.close()
    before = path.read_bytes()

    with pytest.raises(NotADatabaseError, match=r"db\.sqlite holds tables of something else"):
        open_database(str(path))

    assert path.read_bytes() == before


def test_folder_is_not_a_database(tmp_path):
    with pytest.raises(NotADatabaseError, match="is a folder: name a file in it"):
        open_database(str(tmp_path))


def test_writer_raises_locked_error_after_the_timeout(make_url, build):
    url = make_url()
    with (
        open_database(url) as first,
        open_database(url, busy_timeout_s=0.05) as second,
        first.session() as writing,
    ):
        add_record(writing, build.a_record("one"))

        with pytest.raises(LockedError, match="is locked: another"), second.session() as session:
            add_record(session, build.a_record("two"))
        with second.session() as session:
            assert list(queries.stored_records(session, Record)) == []  # a reader need not wait


def test_read_only_file_is_refused_before_any_work(path, unprivileged):
    _as_owner(lambda: open_database(str(path)).close())
    _as_owner(lambda: (path.chmod(0o444), path.parent.chmod(0o755)))

    with pytest.raises(ReadOnlyError, match=r"db\.sqlite is read-only, its file"):
        open_database(str(path))


def test_read_only_folder_can_only_be_read(path, build, unprivileged):
    def prepare():
        with open_database(str(path)) as database, database.session() as session:
            add_record(session, build.a_record())
        path.chmod(0o666)
        path.parent.chmod(0o555)

    _as_owner(prepare)

    with pytest.raises(ReadOnlyError, match=r"db\.sqlite is read-only, its folder"):
        open_database(str(path))
    with open_database(str(path), read_only=True) as database, database.session() as session:
        assert list(queries.stored_records(session, Record)) == [build.a_record()]
    _as_owner(lambda: path.parent.chmod(0o755))


def test_folder_that_can_not_be_created_is_reported(tmp_path, unprivileged):
    _as_owner(lambda: tmp_path.chmod(0o555))
    with pytest.raises(ReadOnlyError, match=r"db\.sqlite can't be created: Permission denied"):
        open_database(str(tmp_path / "new" / "db.sqlite"))
    _as_owner(lambda: tmp_path.chmod(0o755))


def test_reader_can_not_write(database, build):
    url = database.path or database.engine.url.render_as_string(hide_password=False)
    with (
        open_database(str(url), read_only=True) as reader,
        pytest.raises(ReadOnlyError, match="is read-only"),
        reader.session() as session,
    ):
        add_record(session, build.a_record())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://ann:secret@host/x", "unknown database scheme 'mysql': write a path"),
        ("postgresl://ann:secret@host/x", "did you mean postgresql?"),
        ("postgresql+psycopg2://ann:secret@host/x", "unknown database scheme"),
        ("postgresql://ann:secret@host:port/x", "a postgresql URL that can't be read"),
        ("", "'' names no database: write a path"),
    ],
)
def test_unknown_scheme_is_refused_without_showing_the_password(url, message):
    with pytest.raises(UnknownSchemeError) as caught:
        open_database(url)

    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_sqlite_url_without_a_file_is_refused():
    for url in ("sqlite://", "sqlite:///:memory:"):
        with pytest.raises(NotADatabaseError, match="write sqlite:///PATH"):
            open_database(url)


@pytest.mark.parametrize("url", [
    "postgresql://ann:secret@127.0.0.1:1/x",
    "postgres://ann@127.0.0.1:1/x?password=secret",
])  # fmt: skip
def test_unreachable_server_is_reported_without_its_password(url):
    pytest.importorskip("psycopg", reason="psycopg is not installed: flexq-bench[postgres]")
    with pytest.raises(UnreachableError, match=r"can't be reached: .*refused") as caught:
        open_database(url)

    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_database_of_a_server_is_reported(postgresql_server):
    with pytest.raises(UnreachableError, match='database "nope" does not exist'):
        open_database(postgresql_server.format(database="nope"))


def test_postgresql_without_driver_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with pytest.raises(MissingDriverError, match=r"pip install 'flexq-bench\[postgres\]'"):
        open_database("postgresql://host/x")


def _as_owner(work):
    """Run `work` with the rights that the tests were started with."""
    effective = os.geteuid()
    os.seteuid(os.getuid())
    try:
        work()
    finally:
        os.seteuid(effective)


def test_path_may_begin_with_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))

    with open_database("~/db.sqlite") as database:
        assert database.path == Path(tmp_path) / "db.sqlite"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/ann/flexq.sqlite", "nfs4"),
        ("/data/ann/local disk/flexq.sqlite", None),
        ("/var/flexq.sqlite", None),
        ("/database/flexq.sqlite", None),
    ],
)
def test_network_file_system_is_that_of_the_longest_mount_point(tmp_path, path, kind):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda1 / ext4 rw 0 0\nserver:/data /data nfs4 rw 0 0\n"
        "/dev/sdb1 /data/ann/local\\040disk xfs rw 0 0\n"
    )

    assert network_file_system(Path(path), mounts) == kind


def test_new_file_on_a_network_file_system_has_no_wal(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("flexq_bench.db.engine.network_file_system", lambda path: "nfs4")
    with open_database(str(tmp_path / "far.sqlite")) as database, database.session() as session:
        mode = session.connection().exec_driver_sql("PRAGMA journal_mode").scalar()

    assert mode == "delete"
    assert "use it from one host" in caplog.text
