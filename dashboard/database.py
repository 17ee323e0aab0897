"""The database that the app reads, what a viewer sees when it can't be read or is empty, and the
only functions of the app that write: states and notes of alerts, and requests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import streamlit as st

from dashboard.settings import READ_ONLY_VARIABLE, SERVER_VARIABLE
from dashboard.shared.formatting import as_code, as_text
from db.engine import Database, Session, open_database
from db.errors import DatabaseError, ReadOnlyError
from db.requests import RequestInfo
from db.urls import ENVIRONMENT_VARIABLE
from db.verdict_store import decide_on_alert
from flexq_bench.runs import command_lines


def current_database() -> Database:
    """The database that the command line named, opened once for all viewers, for reading only.

    Raises DatabaseError; a failure is not remembered, so a reload tries again.
    """
    return _opened(os.environ.get(ENVIRONMENT_VARIABLE)).database


def is_read_only() -> bool:
    """Return True if the app was started so that it writes nothing at all."""
    return bool(os.environ.get(READ_ONLY_VARIABLE))


def write_request(request: RequestInfo) -> None:
    """Queue what a person asks the fleet to measure.

    Raises DatabaseError, LimitError where its requester has too much open, and ReadOnlyError where
    the app was started to write nothing.
    """
    from flexq_bench.fleet.requests import submit  # brings torch, which no other page waits for

    with _writing() as session:
        submit(session, request)


def write_alert(alert_id: int, state: str, *, seen_events: int, person: str, note: str) -> None:
    """Give an alert this state and note; the state that it has: add the note alone.

    Every page reads through a connection that can't write.

    seen_events: how many the viewer saw; who decides on what is no longer so is told. Raises
    DatabaseError, and ReadOnlyError where the app was started to write nothing.
    """
    now = datetime.now(UTC)
    with _writing() as session:
        decide_on_alert(
            session, alert_id, state, seen_events=seen_events, person=person, note=note, at=now
        )


@contextmanager
def _writing() -> Iterator[Session]:
    """A session that can write, open just as long as that takes."""
    if is_read_only():
        raise ReadOnlyError("this dashboard is read-only: start one without --read-only")
    url = os.environ.get(ENVIRONMENT_VARIABLE)
    with open_database(url, create=False) as database, database.session() as session:
        yield session


@contextmanager
def errors_shown() -> Iterator[None]:
    """Show a DatabaseError of the block as one line and end the page there."""
    try:
        yield
    except DatabaseError as error:
        st.error(as_text(str(error)), icon=":material/database_off:")
        st.stop()


def show_empty_database(database: Database) -> None:
    """Say that the database holds no results, and by which commands to fill it."""
    measure = command_lines.command("run", "smoke", *command_lines.database_arguments(database))
    load = command_lines.command(
        "db", "import", "FILE", *command_lines.database_arguments(database)
    )
    st.info(
        f"No results in {as_code(database.url)} yet. Measure something: {as_code(measure)}, or "
        f"load records that another machine wrote: {as_code(load)}. Then reload this page.",
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
    if _file_of(opened.database.path) == opened.file:
        return True
    opened.database.close()
    return False


def keep_imports() -> None:
    """Let no collection of garbage go through what is there by now, which is mostly imports.

    One that does stops a page for a tenth of a second or more, as often as every third view. Once:
    what is garbage by now stays, too.
    """
    if not gc.get_freeze_count():
        gc.freeze()


@st.cache_resource(show_spinner=False, validate=_is_current)
def _opened(url: str | None) -> _Opened:
    database = open_database(url, create=False, read_only=True)
    if os.environ.get(SERVER_VARIABLE):
        keep_imports()
    return _Opened(database, _file_of(database.path))


def _file_of(path: Path | None) -> tuple[int, int] | None:
    """Return a file's device and inode numbers, which differ for a file that replaced it.

    None: a server, or no file.
    """
    if path is None or not path.exists():
        return None
    status = path.stat()
    return status.st_dev, status.st_ino
