"""Output of a gate's reports to files or stdout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import typer

from flexq_bench.errors import UsageError
from flexq_bench.runs.result_files import STDOUT, check_writable

ReportT = TypeVar("ReportT")


def check_files(files: Mapping[str, str | None]) -> None:
    """Raise UsageError for files that can't be written, before measuring. files: by option."""
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
    """Write the report in each option's format. Raises UsageError if a file can't be written."""
    for option, path in files.items():
        if path == STDOUT:
            typer.echo(writers[option](report), nl=False)
        elif path is not None:
            try:
                Path(path).write_text(writers[option](report), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"can't write {path}: {error.strerror or error}") from error
