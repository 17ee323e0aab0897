"""Resolution of the database's URL: a URL, a path, $FLEXQ_BENCH_DB, or the default path."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from flexq_bench.db.errors import NotADatabaseError, UnknownSchemeError

if TYPE_CHECKING:
    from sqlalchemy import URL

ENVIRONMENT_VARIABLE = "FLEXQ_BENCH_DB"
SQLITE = "sqlite"
POSTGRESQL = "postgresql+psycopg"
_DRIVERS = {
    "sqlite": SQLITE,
    "sqlite+pysqlite": SQLITE,
    "postgresql": POSTGRESQL,
    "postgres": POSTGRESQL,
    "postgresql+psycopg": POSTGRESQL,
}
_FORMS = "a path, sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE"


def default_path() -> Path:
    """Return the default SQLite file, in the user's data folder."""
    folder = platformdirs.user_data_path("flexq-bench", appauthor=False)
    return folder / "flexq-bench.sqlite"


def resolve_url(database: str | None) -> URL:
    """Return the URL of `database`; None: $FLEXQ_BENCH_DB, or the default path if that is unset.

    A text without `://` is the path of a SQLite file. Raises UnknownSchemeError for a database
    that is neither SQLite nor PostgreSQL, or has no name, NotADatabaseError if a SQLite URL names
    no file.
    """
    from sqlalchemy import URL, make_url  # here, because names alone need no SQLAlchemy
    from sqlalchemy.exc import ArgumentError

    if database is not None and not database.strip():
        raise UnknownSchemeError(f"{database!r} names no database: write {_FORMS}")
    text = database or os.environ.get(ENVIRONMENT_VARIABLE) or str(default_path())
    if not text.strip() or not text.isprintable():
        raise UnknownSchemeError(f"{text!r} names no database: write {_FORMS}")
    if "://" not in text:
        return URL.create(SQLITE, database=_absolute_path(text))
    scheme = text.partition("://")[0]
    driver = _DRIVERS.get(scheme.lower())
    if driver is None:
        raise UnknownSchemeError(f"unknown database scheme {scheme!r}: {_suggestion(scheme)}")
    try:
        url = make_url(text).set(drivername=driver)
    except (ArgumentError, ValueError):
        # The text is not in the message: it may contain a password.
        raise UnknownSchemeError(f"a {scheme} URL that can't be read: write {_FORMS}") from None
    if driver == POSTGRESQL:
        return url
    if not url.database or url.database == ":memory:":
        raise NotADatabaseError(f"{scheme} URL without a file: write sqlite:///PATH")
    return url.set(database=_absolute_path(url.database))


def is_default(database: str | None) -> bool:
    """Return True if neither `database` nor $FLEXQ_BENCH_DB names a database."""
    return not (database or os.environ.get(ENVIRONMENT_VARIABLE))


def display(url: URL) -> str:
    """Return a database's name for messages: a file's path, or a URL without its password."""
    if url.drivername == SQLITE and url.database:
        return url.database
    shown = url.set(drivername="postgresql", query={})
    return shown.render_as_string(hide_password=True)


def _absolute_path(text: str) -> str:
    # Path.expanduser would raise for an unknown user.
    return str(Path(os.path.expanduser(text)).absolute())


def _suggestion(scheme: str) -> str:
    near = difflib.get_close_matches(scheme, _DRIVERS, n=1)
    return f"did you mean {near[0]}? Write {_FORMS}" if near else f"write {_FORMS}"
