"""Translate driver errors into DatabaseError with a one-line message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from flexq_bench.db.errors import (
    BusyError,
    DatabaseError,
    LockedError,
    NotADatabaseError,
    ReadOnlyError,
    StandbyError,
    UnreachableError,
)

_ROW_DECODERS = "sqlalchemy/engine/*result*.py"
_SAMPLES = "db/samples.py"
_DAMAGED = "is damaged: restore a copy, or import an export of it into a new file"

# Fragment of the driver's message -> error. Older sqlite3 modules expose no error codes;
# PostgreSQL's errors are matched by SQLSTATE.
_SQLITE: tuple[tuple[str, type[DatabaseError], str], ...] = (
    ("is locked", LockedError, "is locked: another process has been writing for longer than the "
     "timeout, so try again when it is done"),
    ("readonly database", ReadOnlyError, "is read-only: make file and folder writable, or name "
     "another database with --db"),
    ("not a database", NotADatabaseError, "is not a SQLite database: name another file with --db"),
    ("malformed", NotADatabaseError, _DAMAGED),
    ("Could not decode to UTF-8", NotADatabaseError, _DAMAGED),
    ("unable to open", ReadOnlyError, "can't be opened: check that the path exists and may be "
     "written"),
    ("is full", DatabaseError, "can't grow, the disk is full: free space, or run "
     "`flexq-bench db prune`"),
)  # fmt: skip
_POSTGRESQL: dict[str, tuple[type[DatabaseError], str]] = {
    "55P03": (LockedError, "is locked: another process has been writing for longer than the "
              "timeout, so try again when it is done"),
    "25006": (StandbyError, "is read-only: connect to the primary server"),
    "42501": (ReadOnlyError, "does not let this user write: grant it the rights on the tables"),
    "53100": (BusyError, "can't grow, the server's disk is full: free space, or run "
              "`flexq-bench db prune`"),
}  # fmt: skip


# SQLSTATE classes (PostgreSQL's documentation, appendix A): connection exceptions, and a server
# that is shutting down or starting.
_GOING_AWAY = ("08", "57P")
# Transaction rollback (serialization failure, deadlock), insufficient resources (memory,
# connections), a cancelled query (statement_timeout, or an administrator), an idle transaction that
# was ended, and an operating system's error: the same transaction can succeed later.
_PASSING = ("40", "53", "57014", "25P03", "25P04", "58030")


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Re-raise driver errors of the block as DatabaseError. name: of the database, for messages."""
    try:
        yield
    except SQLAlchemyError as error:
        raise translate(error, name) from error
    except (ValueError, RecursionError) as error:
        if not _is_of_stored_value(error):
            raise
        raise NotADatabaseError(f"{name} {_DAMAGED}") from error


def translate(error: SQLAlchemyError, name: str) -> DatabaseError:
    """Return the DatabaseError for a driver's error. name: of the database, for messages."""
    error = _root_error(error)
    original = error.orig if isinstance(error, DBAPIError) else None
    reason = _first_line(original or error)
    code = getattr(original, "sqlstate", None)
    if code in _POSTGRESQL:
        kind, message = _POSTGRESQL[code]
        return kind(f"{name} {message}")
    if original is not None and type(original).__module__.startswith("sqlite3"):
        for fragment, kind, message in _SQLITE:
            if fragment in reason:
                return kind(f"{name} {message}")
    elif isinstance(error, DBAPIError) and code is not None and code.startswith(_PASSING):
        return BusyError(f"{name} gave the transaction up: {reason}; try again")
    elif isinstance(error, DBAPIError) and (
        error.connection_invalidated or code is None or code.startswith(_GOING_AWAY)
    ):
        return UnreachableError(
            f"{name} can't be reached: {reason}; check that the server runs, its address, the "
            "user and the password"
        )
    return DatabaseError(f"{name}: {reason}")


def _is_of_stored_value(error: Exception) -> bool:
    """Return True if reading a row raised the error: invalid UTF-8, JSON, time or samples.

    SQLite stores any bytes in any column, so such values were written by another program.
    """
    within = "sqlalchemy/*/*.py" if isinstance(error, UnicodeDecodeError) else _ROW_DECODERS
    return any(
        Path(frame.f_code.co_filename).match(pattern)
        for frame, _ in walk_tb(error.__traceback__)
        for pattern in (within, _SAMPLES)
    )


def _root_error(error: SQLAlchemyError) -> SQLAlchemyError:
    """Return the first error in the chain.

    On a full disk SQLite rolls back; SQLAlchemy's error is then about the missing savepoint.
    """
    before = error.__context__
    while "no such savepoint" in str(error) and before is not None:
        if isinstance(before, SQLAlchemyError):
            error = before
        before = before.__context__
    return error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
