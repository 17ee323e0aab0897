"""`flexq-bench init`: create the files with which a repository's kernels are measured."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from flexq_bench.cli.output import console, say
from flexq_bench.errors import UsageError
from flexq_bench.runs.command_lines import command


def init(
    folder: Annotated[str, typer.Argument(help="Folder in a git repository.")] = ".",
    install: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="What workflows give to pip: a URL at a version, a wheel's path, or a name in an "
            "index. Default: where this program came from.",
        ),
    ] = None,
    gpu: Annotated[
        bool | None,
        typer.Option(
            "--gpu/--no-gpu", help="Run workflows on a runner with a GPU. Default: as this machine."
        ),
    ] = None,
) -> None:
    """Write flexq-bench.toml, a suite, and workflows that gate pull requests and run nights.

    Kernels are found by their import of flexq_bench.api. If one of the files exists, nothing is
    written: exit code 2.
    """
    from flexq_bench.repository.project_files import (
        default_install,
        missing_kernels,
        write_first_files,
    )

    if not folder.strip():
        raise UsageError(f"{folder!r} names nothing: name a folder, or leave it out for this one")
    source = install or default_install()
    place = Path(os.path.expanduser(folder))
    has_gpu = shutil.which("nvidia-smi") is not None if gpu is None else gpu
    files = write_first_files(place, source, gpu=has_gpu)
    for path in files.texts:
        say(console(), f"wrote {path}")
    local = ": only runners on this machine reach it, else give --install"
    say(console(), f"workflows install {source}{local if 'file:///' in source else ''}")
    for missing in missing_kernels(place):
        say(
            console(),
            f"no file imports flexq_bench.api yet: write {missing}, or name yours there; "
            f"{command('tour')} shows a kernel",
        )
    if files.badge:
        say(console(), f"for your README: {files.badge}")
    say(console(), f"commit them, then: {command('run', '--project', folder)}")
