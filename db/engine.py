"""Open a database (SQLite by default, PostgreSQL by URL) and its sessions."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session as Session  # re-exported for annotations of callers
from sqlalchemy.pool import QueuePool

from flexq_bench.db import schema
from flexq_bench.db.dialects import WRITER_SILENCE, lock_for_writing
from flexq_bench.db.errors import (
    FileMovedError,
    MissingDatabaseError,
    MissingDriverError,
    NotADatabaseError,
    ReadOnlyError,
    SchemaError,
)
from flexq_bench.db.translate import translated
from flexq_bench.db.urls import SQLITE, display, resolve_url

__all__ = [
    "BUSY_TIMEOUT_S",
    "Database",
    "Session",  # for signatures of callers that do not import SQLAlchemy
    "open_database",
    "revision_of",
    "upgrade",
]

BUSY_TIMEOUT_S = 30.0  # timeout of a writer that waits for another one
SILENCE_S = 60.0  # longer than any lock timeout: a server that is silent this long has hung
_CONNECT_TIMEOUT_S = 10
# With a write-ahead log a commit survives the end of any process, though not that of the machine.
_SYNCHRONOUS = "NORMAL"
_NETWORK_FILE_SYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "afs",
    "ceph",
    "lustre",
    "glusterfs",
}

log = logging.getLogger(__name__)


class Database:
    """An open database. Close it, or use it as a context manager.

    file: the SQLite file if it is opened for writing; None: a server, or a read-only file.
    """

    def __init__(self, url: URL, engine: Engine, file: OpenFile | None = None) -> None:
        self._url, self._file = url, file
        self.engine = engine
        self._watch: Connection | None = None
        self._watch_lock = threading.Lock()

    @property
    def url(self) -> str:
        """The path of a SQLite file, or the server's URL without its password."""
        return display(self._url)

    @property
    def path(self) -> Path | None:
        """The SQLite file; None on a server."""
        if self._url.drivername == SQLITE and self._url.database:
            return Path(self._url.database)
        return None

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Open a session: committed at the end of the block, rolled back if it raises.

        Keep sessions that write short: other writers wait from the first write to the end. Raises
        FileMovedError instead of writing into a file that was deleted or replaced; LockedError,
        ReadOnlyError or another DatabaseError for errors of the driver.
        """
        if self._file is not None:
            self._file.check()
        with translated(self.url), Session(self.engine, expire_on_commit=False) as session:
            try:
                yield session
                if self._file is not None:
                    self._file.check()
                session.commit()
            except KeyboardInterrupt:
                # In the middle of a statement, where a rollback would raise another error.
                session.invalidate()
                raise

    @contextmanager
    def opened_file_session(self) -> Iterator[Session]:
        """Open a read-only session on the opened file, even if it was deleted since.

        SQLite's open connections still reach it. Raises FileMovedError if none is open.
        """
        with translated(self.url), Session(self.engine, expire_on_commit=False) as session:
            yield session
            session.rollback()

    def version(self) -> int | None:
        """Return a number that changes when another connection commits; None for a server.

        Commits of this object's own sessions do not always change it.
        """
        if self._url.drivername != SQLITE:
            return None
        with self._watch_lock, translated(self.url):
            # Numbers of two connections are not comparable: keep one connection for them.
            if self._watch is None:
                self._watch = self.engine.connect()
            number = self._watch.exec_driver_sql("PRAGMA data_version").scalar_one()
            self._watch.rollback()
        return int(number)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class OpenFile:
    """Identity (device and inode) of the file at a path when this object is created.

    A missing file is created, empty. Raises ReadOnlyError if it can't be created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.touch()
            self._identity = self._stat_identity()
        except OSError as error:
            raise ReadOnlyError(f"{path} can't be created: {error.strerror or error}") from error

    def check(self) -> None:
        """Raise FileMovedError unless the path is still this file."""
        try:
            same = self._stat_identity() == self._identity
        except OSError:
            same = False
        if not same:
            raise FileMovedError(
                f"{self._path} was deleted or replaced since it was opened: nothing more is "
                "stored in it"
            )

    def _stat_identity(self) -> tuple[int, int]:
        status = os.stat(self._path)
        return status.st_dev, status.st_ino


def open_database(
    url: str | None = None,
    *,
    create: bool = True,
    read_only: bool = False,
    check_schema: bool = True,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
    silence_s: float = SILENCE_S,
) -> Database:
    """Open a database by URL or by the path of a SQLite file.

    url None: $FLEXQ_BENCH_DB, else flexq-bench.sqlite in the user's data folder. A SQLite file that
    is missing or empty is created with its tables, unless `create` is False or `read_only` True.
    check_schema False: accept tables of any revision, for `upgrade`. busy_timeout_s: wait for
    another writer before LockedError. silence_s: wait for the server's answer to a statement before
    UnreachableError; with the writer's lock, the server waits as long for the next one. Raises
    DatabaseError.
    """
    target = resolve_url(url)
    name = display(target)
    is_file = target.drivername == SQLITE
    if is_file:
        _check_file(Path(name), create=create, read_only=read_only)
        file = None if read_only else OpenFile(Path(name))
        engine = _sqlite_engine(target, file, busy_timeout_s=busy_timeout_s)
    else:
        file = None
        engine = _postgresql_engine(
            target, read_only=read_only, busy_timeout_s=busy_timeout_s, silence_s=silence_s
        )
    database = Database(target, engine, file)
    try:
        revision = revision_of(database)
        if revision is None and is_file and create and not read_only:
            with translated(name):
                _use_write_ahead_log(database)
            revision = upgrade(database).after
        if check_schema:
            with _with_database_name(name):
                schema.check_revision(revision)
    except BaseException:
        database.close()
        raise
    return database


def upgrade(database: Database) -> schema.Upgrade:
    """Migrate the tables to this version in one transaction; no effect if they are up to date.

    Raises NewerSchemaError, NotADatabaseError, LockedError, ReadOnlyError.
    """
    name = database.url
    with (
        translated(name),
        _with_database_name(name),
        database.engine.connect() as connection,
        _copied_tables(connection),
        connection.begin(),
    ):
        lock_for_writing(connection)
        return schema.migrate(connection)


def revision_of(database: Database) -> str | None:
    """Return the revision of the tables; None: there are none. Raises NotADatabaseError."""
    name = database.url
    with translated(name), _with_database_name(name), database.engine.connect() as connection:
        return schema.current_revision(connection)


def network_file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Return the type of a file's file system if it is a network file system, else None."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        return None
    absolute = path.absolute()
    mounted = [
        (len(point), kind)
        for point, kind in (line.split(" ")[1:3] for line in lines if line.count(" ") >= 3)
        if absolute.is_relative_to(point.replace("\\040", " "))
    ]
    kind = max(mounted, default=(0, ""))[1]
    return kind if kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse.ssh") else None


@contextmanager
def _copied_tables(connection: Connection) -> Iterator[None]:
    """Disable foreign keys in SQLite, so that a migration can replace a table by an altered copy.

    SQLite can't alter a constraint of a table. Replacing the table drops it, which deletes its
    rows; foreign keys of other tables would forbid that. The setting has no effect within a
    transaction (https://sqlite.org/lang_altertable.html, 7).
    """
    if connection.dialect.name != SQLITE:
        yield
        return
    driver: Any = connection.connection.driver_connection
    driver.execute("PRAGMA foreign_keys=OFF")
    try:
        yield
    finally:
        driver.execute("PRAGMA foreign_keys=ON")


@contextmanager
def _with_database_name(name: str) -> Iterator[None]:
    """Prefix errors of db.schema, which knows only a connection, with the database's name."""
    try:
        yield
    except (SchemaError, NotADatabaseError) as error:
        raise type(error)(f"{name} {error}") from None


def _check_file(path: Path, *, create: bool, read_only: bool) -> None:
    """Raise for a file that can't be used; SQLite itself would raise only at the first write."""
    try:
        if path.is_dir():
            raise NotADatabaseError(f"{path} is a folder: name a file in it")
        exists = path.exists()
        if (not exists or path.stat().st_size == 0) and (read_only or not create):
            problem = f"{path} is an empty file" if exists else f"no database at {path}"
            raise MissingDatabaseError(
                f"{problem}: measure something first (flexq-bench run smoke), or name another one "
                "with --db"
            )
        if not exists:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not os.access(path, os.R_OK, effective_ids=_EFFECTIVE):
            raise ReadOnlyError(f"{path} can't be read: its permissions forbid it")
    except OSError as error:
        raise ReadOnlyError(f"{path} can't be created: {error.strerror or error}") from error
    if read_only:
        return
    # SQLite writes its journal beside the file, so the folder must be writable as well.
    for part, kind in ((path, "file"), (path.parent, "folder")):
        if part.exists() and not os.access(part, os.W_OK, effective_ids=_EFFECTIVE):
            raise ReadOnlyError(
                f"{path} is read-only, its {kind} can't be written: change the permissions, or "
                "name another database with --db"
            )


_EFFECTIVE = os.access in os.supports_effective_ids


def _sqlite_engine(url: URL, file: OpenFile | None, *, busy_timeout_s: float) -> Engine:
    """Create the engine of a SQLite file. file None: read-only."""
    path = Path(url.database or "")

    def connect() -> sqlite3.Connection:
        if file is not None:
            file.check()  # SQLite would create a new file, or open a different one
            return sqlite3.connect(path, timeout=busy_timeout_s, check_same_thread=False)
        query = "mode=ro"
        # In a read-only folder SQLite can't create its shared-memory file. If there is no journal
        # either, there is no writer, and the file can be opened as immutable.
        journal = path.with_name(path.name + "-wal")
        if not os.access(path.parent, os.W_OK, effective_ids=_EFFECTIVE) and not journal.exists():
            query = "immutable=1"
        return sqlite3.connect(
            f"{path.as_uri()}?{query}", uri=True, timeout=busy_timeout_s, check_same_thread=False
        )

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA synchronous={_SYNCHRONOUS}")

    return engine


def _use_write_ahead_log(database: Database) -> None:
    """Set journal mode WAL, which allows readers beside a writer and is stored in the file.

    For new files only. Not on a network file system: the log's shared memory is local to a host,
    so writes of another host are lost (https://sqlite.org/wal.html, 1).
    """
    path = database.path
    if path is not None and (kind := network_file_system(path)) is not None:
        log.warning(
            "%s is on %s, where several hosts can't write to a SQLite file: use it from one host, "
            "or name a PostgreSQL database",
            path,
            kind,
        )
        return
    with database.engine.connect() as connection:
        try:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        except OperationalError as error:
            # The switch needs an exclusive lock: another process is creating the same file.
            if "locked" not in str(error.orig):
                raise


def _postgresql_engine(
    url: URL, *, read_only: bool, busy_timeout_s: float, silence_s: float
) -> Engine:
    arguments = {} if "connect_timeout" in url.query else {"connect_timeout": _CONNECT_TIMEOUT_S}
    try:
        engine = create_engine(
            url,
            connect_args=arguments,
            pool_pre_ping=True,
            execution_options={WRITER_SILENCE: f"{silence_s * 1000:.0f}ms"},
        )
    except ModuleNotFoundError as error:
        raise MissingDriverError(
            "PostgreSQL needs psycopg: pip install 'flexq-bench[postgres]'"
        ) from error

    def connect(_dialect: Any, _record: Any, args: Any, kwargs: Any) -> Any:
        # psycopg is installed, or the engine would not exist.
        from flexq_bench.db.silent_server import connection_with_timeout

        return connection_with_timeout(display(url), silence_s).connect(*args, **kwargs)

    event.listen(engine, "do_connect", connect)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.execute(f"SET lock_timeout = {round(busy_timeout_s * 1000)}")
        # A cached plan from when a table was empty scans the whole table after it has grown.
        connection.execute("SET plan_cache_mode = force_custom_plan")
        if read_only:
            connection.execute("SET default_transaction_read_only = on")
        connection.commit()

    return engine
