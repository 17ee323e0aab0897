"""`flexq-bench init`: create the files with which a repository's kernels are measured."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from flexq_bench.cli.output import console, say
from flexq_bench.errors import UsageError


def init(
    folder: Annotated[str, typer.Argument(help="Folder in a git repository.")] = ".",
) -> None:
    """Write flexq-bench.toml and a GitHub Actions workflow that gates pull requests.

    Kernels are found by their import of flexq_bench.api. If one of the files exists, nothing is
    written: exit code 2.
    """
    from flexq_bench.repository.project_files import missing_kernels, write_first_files

    if not folder.strip():
        raise UsageError(f"{folder!r} names nothing: name a folder, or leave it out for this one")
    place = Path(os.path.expanduser(folder))
    for path in write_first_files(place):
        say(console(), f"wrote {path}")
    for missing in missing_kernels(place):
        say(console(), f"no file imports flexq_bench.api yet: write {missing}, or name yours there")
    say(console(), f"commit them, then: flexq-bench run --project {shlex.quote(folder)}")
