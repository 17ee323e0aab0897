"""Command lines of this program, formatted so that they can be pasted into a shell."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flexq_bench.db.urls import ENVIRONMENT_VARIABLE, default_path

if TYPE_CHECKING:
    from flexq_bench.db.engine import Database

NAME = "flexq-bench"


def command(*arguments: str) -> str:
    """Format a command line that starts this program with these arguments."""
    return shlex.join((*_program(), *arguments))


def database_arguments(database: Database) -> tuple[str, ...]:
    """The --db option for this database; empty for the default one."""
    from_environment = os.environ.get(ENVIRONMENT_VARIABLE)
    if database.path == default_path() and not from_environment:
        return ()
    if database.path is None and from_environment:
        return ()  # its URL may contain a password, which must not be printed
    return ("--db", database.url)


def user_name() -> str:
    """Return the name of the user, or the user's number if it has no name (in a container)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _program() -> tuple[str, ...]:
    script = Path(sys.argv[0])
    if script.name != NAME:
        return (NAME,) if shutil.which(NAME) else (sys.executable, "-m", "flexq_bench")
    executable = shutil.which(NAME)
    if executable is not None and Path(executable).resolve() == script.resolve():
        return (NAME,)
    path = os.path.relpath(script)
    return (path if not path.startswith("..") else str(script.absolute()),)
