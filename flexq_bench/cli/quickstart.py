"""`flexq-bench quickstart`: three suggested commands for this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from itertools import islice
from pathlib import Path

from flexq_bench.cli.options import DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.errors import MissingDatabaseError
from flexq_bench.errors import FlexqError
from flexq_bench.repository.worktrees import repository_of
from flexq_bench.runs.command_lines import command

_STEP_COUNT = 3


@dataclass(frozen=True, slots=True)
class Machine:
    """State of this machine.

    gpus: usable by torch. run: the newest stored one; None: none. commits: number of comparable
    commits of the git tree, from HEAD on, at most two. changed: the tree has changes.
    """

    gpus: int
    run: str | None
    commits: int
    changed: bool
    has_streamlit: bool


@dataclass(frozen=True, slots=True)
class Step:
    command: str
    purpose: str


def quickstart(db: DbOption = None, as_json: JsonFlag = False) -> None:
    """Suggest three commands, based on this machine, its results and its git tree."""
    steps = list(next_steps(_machine(db), () if db is None else ("--db", db)))
    if as_json:
        print_json(steps)
        return
    out = console()
    say(out, "next:")
    for step in steps:
        say(out, f"  {step.command}")
        say(out, f"      {step.purpose}")


def next_steps(machine: Machine, database: tuple[str, ...] = ()) -> Iterator[Step]:
    """The first three steps that are possible here. database: arguments that name it."""
    return islice(_steps(machine, database), _STEP_COUNT)


def _steps(machine: Machine, database: tuple[str, ...]) -> Iterator[Step]:
    if machine.run is None:
        yield Step(command("run", "smoke", *database), "measure a small suite, in seconds")
    elif machine.has_streamlit:
        yield Step(
            command("dashboard", *database), "view stored results, with histories and intervals"
        )
    else:
        yield Step(command("list", "runs", *database), "see what is stored")
    shapes = ["--n", "256", "--k", "256"]
    purpose = "your own shapes; on a CPU the times are those of a reference"
    if machine.gpus:
        shapes, purpose = ["--model", "llama-2-7b"], "the layers of a model, at your M"
    yield Step(command("sweep", *shapes, "--m", "1,8", "--kernels", "flexq*", *database), purpose)
    if machine.gpus > 1:
        yield Step(
            command("run", "nightly", "--cluster", "local", *database),
            f"measure on all {machine.gpus} GPUs at once",
        )
    if machine.commits and machine.changed:
        yield Step(
            command("compare", "HEAD", ".", "--m", "4", "--processes", "1"),
            "are your changes slower? Both sides are measured interleaved on one device",
        )
    elif machine.commits > 1:
        yield Step(
            command("compare", "HEAD~1", "HEAD", "--m", "4", "--processes", "1"),
            "did the last commit make anything slower? Both sides are measured interleaved",
        )
    yield Step(command("list", "kernels"), "see what can be measured")
    yield Step(command("doctor", *database), "see what this machine lacks")


def _machine(db: str | None) -> Machine:
    import torch

    commits, changed = _tree()
    return Machine(
        torch.cuda.device_count() if torch.cuda.is_available() else 0,
        _newest_run(db),
        commits,
        changed,
        util.find_spec("streamlit") is not None,
    )


def _newest_run(db: str | None) -> str | None:

    try:
        with open_database(db, read_only=True) as database, database.session() as session:
            runs = queries.runs(session, limit=1)
    except MissingDatabaseError:
        return None
    return runs[0].uuid if runs else None


def _tree() -> tuple[int, bool]:
    """Number of comparable commits of the current git tree, at most two; True if it has changes."""
    from flexq_bench.measure.ab.revisions import resolve_pair

    try:
        tree = repository_of(Path.cwd())
        now, head = resolve_pair(tree, ".", "HEAD")
    except FlexqError:
        return 0, False
    try:
        resolve_pair(tree, "HEAD~1", ".")
    except FlexqError:
        return 1, now != head
    return 2, now != head
