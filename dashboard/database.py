"""The database that the app reads, and what a reader sees when it can't be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from dashboard.words import as_text
from db.engine import Database, open_database
from db.errors import DatabaseError
from db.urls import ENVIRONMENT_VARIABLE


def current_database() -> Database:
    """The database that the command line named, opened once for all viewers, for reading only.

    Raises DatabaseError; a failure is not remembered, so a reload tries again.
    """
    return _opened(os.environ.get(ENVIRONMENT_VARIABLE)).database


@contextmanager
def errors_shown() -> Iterator[None]:
    """Show a DatabaseError of the block as one line and end the page there."""
    try:
        yield
    except DatabaseError as error:
        st.error(as_text(str(error)), icon=":material/database_off:")
        st.stop()


@dataclass(frozen=True, slots=True)
class _Opened:
    database: Database
    file: tuple[int, int] | None


def _is_current(opened: _Opened) -> bool:
    """Whether the file is still the one opened: a replaced file would be read as it was."""
    if _file_of(opened.database.path) == opened.file:
        return True
    opened.database.close()
    return False


@st.cache_resource(show_spinner=False, validate=_is_current)
def _opened(url: str | None) -> _Opened:
    database = open_database(url, create=False, read_only=True)
    return _Opened(database, _file_of(database.path))


def _file_of(path: Path | None) -> tuple[int, int] | None:
    """What tells a file from another one that took its name; None: a server, or no file."""
    if path is None or not path.exists():
        return None
    found = path.stat()
    return found.st_dev, found.st_ino
