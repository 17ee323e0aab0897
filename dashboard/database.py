"""Database of the app: access, error and empty-state messages, and all writes.

The app writes only states and notes of alerts, and requests.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import streamlit as st

from flexq_bench.dashboard.settings import READ_ONLY_VARIABLE, SERVER_VARIABLE
from flexq_bench.dashboard.shared.formatting import as_code, as_text
from flexq_bench.db.decisions import decide_on_alert
from flexq_bench.db.engine import Database, Session, open_database
from flexq_bench.db.errors import DatabaseError, ReadOnlyError
from flexq_bench.db.requests import RequestInfo
from flexq_bench.db.urls import ENVIRONMENT_VARIABLE
from flexq_bench.runs import command_lines


def current_database() -> Database:
    """Return the database of the command line, opened read-only, once for all viewers.

    Raises DatabaseError; a failure is not cached, so a reload tries again.
    """
    return _open_cached(os.environ.get(ENVIRONMENT_VARIABLE)).database


def is_read_only() -> bool:
    """Return True if the app was started with --read-only."""
    return bool(os.environ.get(READ_ONLY_VARIABLE))


def write_request(request: RequestInfo) -> None:
    """Queue a request for measurements by the fleet.

    Raises DatabaseError, LimitError if the requester has too many open requests, ReadOnlyError if
    the app is read-only.
    """
    from flexq_bench.fleet.requests import submit  # imports torch, which other pages don't need

    with _writing() as session:
        submit(session, request)


def write_alert(alert_id: int, state: str, *, seen_events: int, person: str, note: str) -> None:
    """Set the state of an alert and add a note; if the state is the current one, only add the note.

    seen_events: number of events that the viewer saw. Raises StaleError if the alert has more by
    now, other DatabaseErrors, and ReadOnlyError if the app is read-only.
    """
    now = datetime.now(UTC)
    with _writing() as session:
        decide_on_alert(
            session, alert_id, state, seen_events=seen_events, person=person, note=note, at=now
        )


@contextmanager
def _writing() -> Iterator[Session]:
    """Open a writable session; pages read through a read-only connection."""
    if is_read_only():
        raise ReadOnlyError("this dashboard is read-only: start one without --read-only")
    url = os.environ.get(ENVIRONMENT_VARIABLE)
    with open_database(url, create=False) as database, database.session() as session:
        yield session


@contextmanager
def errors_shown() -> Iterator[None]:
    """Show a DatabaseError of the block as one line and stop the page."""
    try:
        yield
    except DatabaseError as error:
        st.error(as_text(str(error)), icon=":material/database_off:")
        st.stop()


def command_on(database: Database, *arguments: str) -> str:
    """Return Markdown of a command line of this program that uses this database."""
    options = command_lines.database_arguments(database)
    return as_code(command_lines.command(*arguments, *options))


def gate_command(database: Database, *options: str, base: str = "HEAD~1") -> str:
    """Return Markdown of a command line that compares HEAD with its parent, or another base."""
    gate = ("gate", "perf", "--base", base, "--head", "HEAD", "--policy", "default")
    return command_on(database, *gate, *options)


def show_empty_database(database: Database) -> None:
    """Show that the database has nothing for this page, and the commands to add results."""
    st.info(
        f"{as_code(database.url)} has nothing for this page yet. Measure something: "
        f"{command_on(database, 'run', 'smoke')}, or import records of another machine: "
        f"{command_on(database, 'db', 'import', 'FILE')}. Then reload this page.",
        icon=":material/science:",
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    database: Database
    file: tuple[int, int] | None


def _is_current(opened: _Opened) -> bool:
    """Return True if the file is still the one opened; otherwise close the database.

    Reads of a replaced file would return its old content.
    """
    if file_identity(opened.database.path) == opened.file:
        return True
    opened.database.close()
    return False


def keep_imports() -> None:
    """Exclude all current objects, mostly imports, from garbage collection; once per process.

    A full collection stops a page for 0.1 s or more, up to every third view. Objects that are
    garbage at this time are never freed.
    """
    if not gc.get_freeze_count():
        gc.freeze()


def _release(opened: _Opened) -> None:
    opened.database.close()


@st.cache_resource(show_spinner=False, validate=_is_current, on_release=_release)
def _open_cached(url: str | None) -> _Opened:
    database = open_database(url, create=False, read_only=True)
    if os.environ.get(SERVER_VARIABLE):
        keep_imports()
    return _Opened(database, file_identity(database.path))


def file_identity(path: Path | None) -> tuple[int, int] | None:
    """Return a file's device and inode numbers, which differ for a file that replaced it.

    None: a server, or no file.
    """
    if path is None or not path.exists():
        return None
    status = path.stat()
    return status.st_dev, status.st_ino
