"""`flexq-bench fleet`: devices and hosts that get no work for a while."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from flexq_bench.cli.options import DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.db import queries
from flexq_bench.db.engine import Session, open_database
from flexq_bench.db.fleet import drain as store_drain
from flexq_bench.db.fleet import end_drain
from flexq_bench.errors import UsageError
from flexq_bench.runs.command_lines import user_name

_MIN_PREFIX = 8  # characters of a device's uuid

app = typer.Typer(help="Take nodes and GPUs out of the fleet, and put them back.")

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="NODE|GPU", help="A host's name, or a device's uuid or its beginning (status)."
    ),
]


@app.command()
def drain(
    target: TargetArgument,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, shown by fleet list.")],
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Give a node or GPU no more work: its current cases and comparisons are finished.

    It applies to every run on this database, on a cluster or not, until `fleet resume`.
    """
    if not reason.strip():
        raise UsageError("--reason is empty: say why, for those who find it drained")
    with open_database(db, create=False) as database, database.session() as session:
        name = _known(session, target)
        store_drain(session, name, reason=reason.strip(), person=user_name(), at=datetime.now(UTC))
        drained = next(row for row in queries.drains(session) if row.target == name)
        if as_json:
            print_json(drained)
        else:
            say(console(), f"{name} gets no more work: {drained.reason}")


@app.command()
def resume(target: TargetArgument, db: DbOption = None, as_json: JsonFlag = False) -> None:
    """Give a drained node or GPU work again."""
    with open_database(db, create=False) as database, database.session() as session:
        drained = [row.target for row in queries.drains(session)]
        matching = [name for name in drained if name == target or _is_prefix(target, name)]
        if len(matching) != 1:
            raise UsageError(f"{target} is not drained: {', '.join(drained) or 'nothing'} is")
        end_drain(session, matching[0])
        if as_json:
            print_json({"resumed": matching[0]})
        else:
            say(console(), f"{matching[0]} gets work again, also in runs in progress")


@app.command("list")
def list_(db: DbOption = None, as_json: JsonFlag = False) -> None:
    """List what is drained, since when, by whom and why."""
    with open_database(db, create=False) as database, database.session() as session:
        rows = queries.drains(session)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        say(console(), f"{row.target}: by {row.drained_by} at {row.drained_at:%F %R}, {row.reason}")
    if not rows:
        say(console(), "nothing is drained")


def _known(session: Session, target: str) -> str:
    """Return the host or device that a target names. Raises UsageError."""
    workers = queries.workers(session)
    devices = sorted({device.uuid for device in queries.devices(session)})
    hosts = sorted({worker.host for worker in workers})
    if target in (*hosts, *devices):
        return target
    matching = [device for device in devices if _is_prefix(target, device)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(f"{target} is the beginning of {', '.join(matching)}: give more of it")
    known = ", ".join((*hosts, *devices)) or "none, as nothing was measured yet"
    raise UsageError(f"no node and no GPU {target!r}: there are {known}")


def _is_prefix(text: str, uuid: str) -> bool:
    return len(text) >= _MIN_PREFIX and uuid.startswith(text)
