"""Errors of databases and results files; each message is one line.

DatabaseError
├── UnknownSchemeError      the URL names an unsupported database
├── MissingDriverError      PostgreSQL without psycopg
├── MissingDatabaseError    there is no file, and none was to be created
├── UnreachableError        the server does not answer, or refuses the connection
├── NotADatabaseError       the file is no database, or holds tables of another program
├── ReadOnlyError           file or folder can't be written
│   └── StandbyError        the server accepts no writes now (failover)
├── FileMovedError          the open file was deleted, or replaced by another one
├── LockedError             another writer locked the database for longer than the timeout
├── BusyError               the server gave the transaction up: a deadlock, a timeout, no memory
├── SchemaError
│   ├── NewerSchemaError    written by a later version
│   └── OlderSchemaError    requires `flexq-bench db upgrade`
├── NotFoundError           no such run or measurement
│   └── AmbiguousError      several runs match the prefix
├── StaleError              the data was changed by somebody else since it was read
├── ConflictError           two runs claim the same idempotency key
├── LimitError              a request is too large, or too many are open
├── ResultsFileError        the results file can't be opened, or has an unknown suffix
└── RecordError             a record that can't be stored
    └── RecordFormatError   a record that can't be read from a file: with its name and line
"""

from __future__ import annotations


class DatabaseError(Exception):
    """Base class. The message is one line: what is wrong and what to do."""


class UnknownSchemeError(DatabaseError):
    """The URL names an unsupported kind of database."""


class MissingDriverError(DatabaseError):
    """The URL needs a driver that is not installed."""


class MissingDatabaseError(DatabaseError):
    """There is no file at the path, and none may be created."""


class UnreachableError(DatabaseError):
    """The server does not answer, or refuses the connection. The message omits the password."""


class NotADatabaseError(DatabaseError):
    """The file is not a SQLite database, or belongs to another program."""


class ReadOnlyError(DatabaseError):
    """The file or its folder can't be written."""


class StandbyError(ReadOnlyError):
    """The server is read-only for now, as a standby is before its promotion."""


class FileMovedError(DatabaseError):
    """The open file was deleted or replaced: a commit would be lost."""


class LockedError(DatabaseError):
    """Another process locked the database for longer than the timeout."""


class BusyError(DatabaseError):
    """The server gave the transaction up for a reason that passes; it has no effect."""


class SchemaError(DatabaseError):
    """The tables do not have the schema of this version."""


class NewerSchemaError(SchemaError):
    """A later version of the package wrote the tables."""


class OlderSchemaError(SchemaError):
    """The tables are missing, or older than this version."""


class NotFoundError(DatabaseError):
    """No stored row matches the name."""


class AmbiguousError(NotFoundError):
    """Several runs match the prefix."""


class StaleError(DatabaseError):
    """The data was changed by somebody else since it was read."""


class ConflictError(DatabaseError):
    """Two different runs claim the same idempotency key."""


class LimitError(DatabaseError):
    """A request is too large, or would exceed a limit on waiting or running jobs."""


class ResultsFileError(DatabaseError):
    """The results file can't be opened, or its suffix is unknown."""


class RecordError(DatabaseError):
    """A record that can't be stored: the message names the field."""


class RecordFormatError(RecordError):
    """A record that can't be read from a file: the message names the file and line."""


# Callers keep the data that is to be stored, and retry.
UNAVAILABLE = (BusyError, LockedError, StandbyError, UnreachableError)
