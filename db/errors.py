"""What can go wrong with a database or a results file, as one line each.

DatabaseError
├── UnknownSchemeError      the URL names a database we do not speak
├── MissingDriverError      PostgreSQL without psycopg
├── MissingDatabaseError    no file there, and none was to be made
├── UnreachableError        the server does not answer, or refuses
├── NotADatabaseError       the file, or the database in it, is something else's
├── ReadOnlyError           file or folder can't be written
│   └── StandbyError        the server takes no writes now: a failover
├── FileMovedError          the open file was deleted, or another one took its name
├── LockedError             somebody else wrote for longer than the timeout
├── SchemaError
│   ├── NewerSchemaError    written by a later version
│   └── OlderSchemaError    waits for `flexq-bench db upgrade`
├── NotFoundError           no such run or measurement
│   └── AmbiguousError      several runs answer to the prefix
├── StaleError              somebody changed meanwhile what was to be changed
├── ConflictError           two runs claim the same idempotency key
├── LimitError              a request is too large, or too much is waiting
├── ResultsFileError        the results file can't be opened, or has an unknown suffix
└── RecordError             a record that can't be stored
    └── RecordFormatError   … read from a file: with its name and line
"""

from __future__ import annotations


class DatabaseError(Exception):
    """Base: the message is one line that says what is wrong and what to do."""


class UnknownSchemeError(DatabaseError):
    """The URL names a database we do not speak."""


class MissingDriverError(DatabaseError):
    """The URL needs a driver that is not installed."""


class MissingDatabaseError(DatabaseError):
    """There is no file at the path, and none was to be made."""


class UnreachableError(DatabaseError):
    """The server does not answer, or refuses us. The message never holds the password."""


class NotADatabaseError(DatabaseError):
    """The file is no SQLite database, or not one of ours."""


class ReadOnlyError(DatabaseError):
    """The file or its folder can't be written."""


class StandbyError(ReadOnlyError):
    """The server takes no writes now, as a standby before it is promoted."""


class FileMovedError(DatabaseError):
    """The file that is open was deleted, or another one took its name: a commit would be lost."""


class LockedError(DatabaseError):
    """Another process held the database for longer than the timeout."""


class SchemaError(DatabaseError):
    """The tables are not those that this version works with."""


class NewerSchemaError(SchemaError):
    """A later version of the package wrote the tables."""


class OlderSchemaError(SchemaError):
    """The tables are missing, or older than this version."""


class NotFoundError(DatabaseError):
    """Nothing stored answers to the name."""


class AmbiguousError(NotFoundError):
    """Several runs answer to the prefix."""


class StaleError(DatabaseError):
    """What was to be changed is no longer as it was seen."""


class ConflictError(DatabaseError):
    """Two different runs claim the same idempotency key."""


class LimitError(DatabaseError):
    """A request is too large, or more would be waiting or running than may be."""


class ResultsFileError(DatabaseError):
    """The results file can't be opened, or its suffix names no format of ours."""


class RecordError(DatabaseError):
    """A record that can't be stored: the message names the field."""


class RecordFormatError(RecordError):
    """A record that can't be read from a file: the message names the file and line."""


# What passes by itself: whoever has something to store keeps it and tries again.
AWAY = (LockedError, StandbyError, UnreachableError)
