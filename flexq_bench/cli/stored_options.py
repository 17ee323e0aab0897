"""Options that are stored with a run, so that it can be resumed without repeating them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from enum import Enum
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import typer

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database

# Of measuring: where and how. The cases are stored as the run's plan.
MEASURING = (
    *("backend", "device", "cluster", "gpus", "repeat", "times"),
    *("seed", "no_tune", "retune", "brief", "kernels_from"),
    *("project", "project_file", "from_trace"),
)
NIGHTLY = (*MEASURING, "suite", "backfill", "canaries", "comparisons", "alert", "report")
_PATHS = (
    "project",
    "project_file",
    "report",
    "kernels_from",
    "suite",
    "from_trace",
)  # stored as absolute paths, if they exist


# Options of the running command: those of the run that it resumes, and those that were given.
_OPTIONS: ContextVar[Mapping[str, Any]] = ContextVar("options", default=MappingProxyType({}))


def given_options(names: Collection[str] = MEASURING) -> dict[str, Any]:
    """Return the options of the running command that were given, as JSON values by name.

    Given on the command line, by a variable of the environment, or with the run that is resumed.
    None of them is a secret: the database is not among them.
    """
    return {name: value for name, value in _OPTIONS.get().items() if name in names}


def arguments_of(options: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Return options as arguments of a command line."""
    given = [(name.replace("_", "-"), options[name]) for name in names if name in options]
    arguments: list[str] = []
    for name, value in given:
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
            continue
        for one in value if isinstance(value, list) else [value]:
            arguments += [f"--{name}", str(one)]
    return arguments


def stores_options(
    find: Callable[[dict[str, Any]], str | None] = lambda values: None,
    names: Collection[str] = MEASURING,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose options are stored with the runs that it starts.

    find: returns the uuid of the run to resume, or a prefix of it, from the command's values, which
    it may change; None: none is resumed. Of the stored options of that run, those with these names
    replace those that are not given.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command).parameters

        @wraps(command)
        def storing(*, context: typer.Context, **values: Any) -> None:
            run = find(values)
            given = {
                name: _plain(name, value)
                for name, value in values.items()
                if value is not None and _is_given(context, name)
            }
            stored = {} if run is None else _stored(run, values["db"])
            missing = {name: value for name, value in stored.items() if name not in given}
            for name in missing.keys() & values.keys() & set(names):
                values[name] = _typed(parameters[name].annotation, missing[name])
            token = _OPTIONS.set({**given, **missing})
            try:
                command(**values)
            finally:
                _OPTIONS.reset(token)

        own = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        vars(storing)["__signature__"] = inspect.Signature([own, *parameters.values()])
        return storing

    return decorated


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _stored(run: str, db: str | None) -> Mapping[str, Any]:
    with open_database(db, create=False) as database, database.session() as session:
        return queries.run_options(session, queries.run_by_uuid_prefix(session, run).uuid)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if name in _PATHS and value is not None and os.path.exists(value):
        return os.path.abspath(value)
    return str(value) if isinstance(value, Path) else value


def _typed(annotation: Any, value: Any) -> Any:
    """Return a stored value as the type of its parameter."""
    if isinstance(annotation, type) and issubclass(annotation, Path | Enum):
        return annotation(value)
    kinds = (_typed(inner, value) for inner in get_args(annotation))
    return next((typed for typed in kinds if typed is not value), value)
