"""Output of a gate's reports: files that a person named, or stdout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import typer

from flexq_bench.errors import UsageError
from flexq_bench.runs.result_files import STDOUT, check_writable

ReportT = TypeVar("ReportT")


def check_files(files: Mapping[str, str | None]) -> None:
    """files: by option. Raises UsageError now: after an hour of measuring is too late."""
    named = {option: path for option, path in files.items() if path is not None}
    for option, path in named.items():
        if path != STDOUT:
            check_writable(option, path)
    paths = [path for path in named.values() if not path.startswith("/dev/")]
    twice = [option for option, path in named.items() if paths.count(path) > 1]
    if twice:
        raise UsageError(f"{' and '.join(twice)} name the same place: give each its own")


def write_reports(
    report: ReportT,
    files: Mapping[str, str | None],
    writers: Mapping[str, Callable[[ReportT], str]],
) -> None:
    """Write what each option's writer makes of the report. Raises UsageError if a file can't be."""
    for option, path in files.items():
        if path == STDOUT:
            typer.echo(writers[option](report), nl=False)
        elif path is not None:
            try:
                Path(path).write_text(writers[option](report), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"can't write {path}: {error.strerror or error}") from error
