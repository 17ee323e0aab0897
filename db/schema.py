"""Schema revision of a database, and its migration to that of this version.

To add a revision: `alembic.command.revision(alembic_config(), "message", rev_id="0003")` from a
Python prompt writes db/migrations/versions/0003_message.py; there is no alembic.ini.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from flexq_bench.db.errors import NewerSchemaError, NotADatabaseError, OlderSchemaError
from flexq_bench.db.tables import Measurement

if TYPE_CHECKING:
    from alembic.config import Config  # takes a third of the time of a short command

MIGRATIONS = Path(__file__).parent / "migrations"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Result of an upgrade. before None: there were no tables."""

    before: str | None
    after: str

    @property
    def changed(self) -> bool:
        return self.before != self.after


def alembic_config(connection: Connection | None = None) -> Config:
    """Return Alembic's configuration, built in code so that no alembic.ini is needed."""
    from alembic.config import Config

    config = Config()
    # Alembic reads % as the start of a substitution.
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@cache
def revisions() -> tuple[str, ...]:
    """Return the revisions known to this version, oldest first: the numbers of their files."""
    files = (MIGRATIONS / "versions").glob("[0-9]*_*.py")
    return tuple(sorted(file.name.partition("_")[0] for file in files))


def current_revision(connection: Connection) -> str | None:
    """Return the revision of a database's tables; None: there are no tables.

    Raises NotADatabaseError if the tables belong to another program, or have not one revision.
    """
    tables = inspect(connection).get_table_names()
    if tables and Measurement.__tablename__ not in tables:
        raise NotADatabaseError("holds tables of something else: name another database with --db")
    # Alembic's own table.
    stored = text("SELECT version_num FROM alembic_version")
    heads = list(connection.scalars(stored)) if "alembic_version" in tables else []
    if len(heads) > 1 or (tables and not heads):
        raise NotADatabaseError(
            f"has tables of {len(heads)} revisions, not of one: it is damaged, or belongs to "
            "another program; restore a copy, or name another database with --db"
        )
    return heads[0] if heads else None


def check_revision(revision: str | None) -> None:
    """Raise OlderSchemaError or NewerSchemaError unless the revision is that of this version."""
    if revision is None:
        raise OlderSchemaError(
            "holds no tables yet: run `flexq-bench db upgrade`, with the same --db if you gave one"
        )
    known = revisions()
    if revision not in known:
        raise NewerSchemaError(
            f"has tables of revision {revision}, this version knows up to {known[-1]}: "
            "upgrade flexq-bench, or name another database with --db"
        )
    if revision != known[-1]:
        raise OlderSchemaError(
            f"has tables of revision {revision}, this version needs {known[-1]}: "
            "run `flexq-bench db upgrade`, with the same --db if you gave one"
        )


def migrate(connection: Connection) -> Upgrade:
    """Apply the missing revisions in the transaction of `connection`.

    Raises NewerSchemaError if a later version wrote the tables.
    """
    from alembic import command

    before = current_revision(connection)
    if before is not None and before not in revisions():
        check_revision(before)
    command.upgrade(alembic_config(connection), "head")
    return Upgrade(before, revisions()[-1])
