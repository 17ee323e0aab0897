"""`flexq-bench tour`: from a kernel of one's own to an alert, in a new repository."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flexq_bench.cli.output import console, say
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.runs.command_lines import command

_FAST = "x.float() @ w.T"
_SLOW = "(x.float() @ torch.cat((w, w)).T)[:, : out.shape[1]]"  # twice the work, same result
_KERNEL = f'''"""A kernel: activations in FP16, weights in 8 bits with a scale per row."""

import torch

from flexq_bench.api import linear_kernel


def prepared(codes, scales):
    """Weights as FP32 numbers, once: preparing them is not timed."""
    return codes.float() * scales.float()


@linear_kernel("my-w8a16", weight="int8/row", prepare_weight=prepared)
def my_w8a16(x, w, out):
    out.copy_({_FAST})
'''
_SUITE = """\
description = "one layer, small enough for a CPU"

[[group]]
kernels = ["tour.*"]
m = "8"
shapes = ["512x512"]
"""


def tour(
    folder: Annotated[
        str | None,
        typer.Argument(help="A new folder for the repository. Default: a temporary one, kept."),
    ] = None,
) -> None:
    """Gate a kernel that a commit makes slower, in minutes, in a new repository.

    Runs the commands that it prints: init, run, gate perf. The gate finds the second commit, and
    opens an alert, which the dashboard shows. Your database is not used.

    Exit code 0: as expected; 5: a step failed, or the gate did not find the commit.
    """
    out = console()
    root = _new_folder(folder)
    db = ("--db", str(root / "tour.sqlite"))
    project = ("--project", str(root))
    say(out, f"1. a repository with a kernel: {root / 'my_kernels.py'}")
    (root / "my_kernels.py").write_text(_KERNEL, "utf-8")
    (root / ".gitignore").write_text("tour.sqlite*\n", "utf-8")
    _git(root, "init", "--quiet", "--initial-branch", "main")
    say(out, "2. files to measure it by, and workflows for GitHub Actions")
    _run(out, "init", str(root), "--install", "flexq-bench", "--no-gpu")
    (root / "bench" / "suite.toml").write_text(_SUITE, "utf-8")
    _commit(root, "A kernel, and how it is measured")
    say(out, "3. measure it")
    _run(out, "run", *project, *db)
    say(out, "4. a commit that makes it slower, as a pull request might")
    source = root / "my_kernels.py"
    source.write_text(source.read_text("utf-8").replace(_FAST, _SLOW), "utf-8")
    _commit(root, "Multiply twice")
    say(out, "5. the gate of a pull request; --alert, as nights do on the watched branch")
    commits = ("--base", "HEAD~1", "--head", "HEAD")
    report = ("--markdown", str(root / "gate.md"))
    gate = ("gate", "perf", *project, *commits, "--alert", *report, *db)
    if _run(out, *gate, expected=(0, 1, 3)) != ExitCode.REGRESSION:
        raise InfrastructureError(
            "the gate did not find the commit that multiplies twice: this machine is too noisy now"
        )
    say(out, f"the comment on a pull request: {root / 'gate.md'}")
    say(out, "next:")
    for words, purpose in (
        (("dashboard", *db), "the alert, its commit and its evidence, on Home"),
        (("explain", "1", *db), "the same in the terminal"),
        (("init", "PATH"), "the same files in a repository of yours"),
        (("demo",), "a database of two weeks, of a CPU and two GPUs"),
    ):
        say(out, f"  {command(*words)}")
        say(out, f"      {purpose}")


def _new_folder(folder: str | None) -> Path:
    """Create the folder, whose name is the project's. Raises UsageError if it exists."""
    if folder is None:
        return _created(Path(tempfile.mkdtemp(prefix="flexq-bench-")) / "tour")
    path = Path(folder).expanduser().absolute()
    if path.name != "tour":
        path /= "tour"
    if path.exists():
        raise UsageError(f"{path} is there already: name a new folder")
    return _created(path)


def _created(path: Path) -> Path:
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{path} can't be created: {error.strerror or error}") from error
    return path


def _run(out: Console, *words: str, expected: Sequence[int] = (0,)) -> int:
    """Print and run a command of this program; its output is shown."""
    say(out, f"  $ {command(*words)}")
    code = subprocess.run([sys.executable, "-m", "flexq_bench.cli", *words]).returncode
    if code not in expected:
        raise InfrastructureError(f"it ended with exit code {code}: its message above says why")
    return code


def _commit(root: Path, subject: str) -> None:
    person = ("-c", "user.name=Tour", "-c", "user.email=tour@example.org")
    _git(root, "add", "--all")
    _git(root, *person, "commit", "--quiet", "--no-gpg-sign", "--message", subject)


def _git(root: Path, *words: str) -> None:
    try:
        subprocess.run(["git", "-C", str(root), *words], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InfrastructureError(f"git {words[0]} failed: {error}") from error
