"""`flexq-bench alerts`: list regressions and set their states."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import MAX_ID, DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, print_wrapped, say
from flexq_bench.db import queries
from flexq_bench.db.decisions import (
    ALERT_STATES,
    OPEN_STATES,
    STATES_WITH_A_REASON,
    set_alert_state,
)
from flexq_bench.db.engine import open_database
from flexq_bench.db.queries import AlertRow
from flexq_bench.errors import UsageError
from flexq_bench.runs.command_lines import user_name
from flexq_bench.verdicts.texts import alert_text
from flexq_bench.workloads.names import unknown

_ALL = "all"
_OPEN = "open"
_SHA_DIGITS = 10

app = typer.Typer(help="List alerts of regressions, and set their states.", no_args_is_help=True)

AlertArgument = Annotated[
    int, typer.Argument(metavar="ALERT", max=MAX_ID, help="Id of the alert (alerts list).")
]
NoteOption = Annotated[
    str, typer.Option("--note", metavar="TEXT", help="Reason for the new state.")
]


@dataclass(frozen=True)
class ChangeOptions:
    """The alert whose state is set, by whom, and where it is stored."""

    alert: AlertArgument
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="NAME", help="Person who changes the state. Default: you."),
    ] = None
    db: DbOption = None
    as_json: JsonFlag = False

    def set(self, state: str, note: str) -> None:

        alert, note = self.alert, note.strip()
        if state in STATES_WITH_A_REASON and not note:
            raise UsageError(f"--note is empty: give the reason why alert {alert} is {state}")
        person = (self.by or "").strip() or user_name()
        now = datetime.now(UTC)
        with open_database(self.db, create=False) as database, database.session() as session:
            before = queries.alert_by_id(session, alert).state
            set_alert_state(session, alert, state, person=person, note=note, at=now)
            after = queries.alert_by_id(session, alert)
        if self.as_json:
            print_json(after)
        else:
            say(console(), f"alert {alert}: {before} -> {state}, by {person}")


@app.command("list")
def list_(
    state: Annotated[
        str,
        typer.Option(
            "--state",
            help="open (new or acknowledged), all, or one of: new, acknowledged, explained, fixed, "
            "false-alarm, ended.",
        ),
    ] = _OPEN,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the alerts, newest first."""

    chosen = {_OPEN: OPEN_STATES, _ALL: ALERT_STATES, **{name: (name,) for name in ALERT_STATES}}
    if state not in chosen:
        raise UsageError(unknown("state", state, chosen))
    with open_database(db, read_only=True) as database, database.session() as session:
        rows = queries.alerts(session, states=chosen[state])
    if as_json:
        print_json(rows)
    elif rows:
        print_wrapped(console(), _table(rows))
    else:
        say(console(), f"no alert is {state}" if state != _ALL else "no alert was ever opened")


@app.command()
@takes_option_groups
def acknowledge(*, change: ChangeOptions, note: NoteOption = "") -> None:
    """Mark an alert as being worked on; this also reopens a closed one."""
    change.set("acknowledged", note)


@app.command()
@takes_option_groups
def explained(*, change: ChangeOptions, note: NoteOption) -> None:
    """Accept the change as intended: its series start a new epoch at the first bad commit."""
    change.set("explained", note)


@app.command()
@takes_option_groups
def fixed(*, change: ChangeOptions, note: NoteOption = "") -> None:
    """Mark it as fixed. Alerts close by themselves when all their series have recovered."""
    change.set("fixed", note)


@app.command("false-alarm")
@takes_option_groups
def false_alarm(*, change: ChangeOptions, note: NoteOption) -> None:
    """Mark it as a false alarm: there was no change."""
    change.set("false-alarm", note)


def _table(rows: list[AlertRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "alert",
        "state",
        "family",
        "commits",
        "worst",
        "series",
        "gpus",
        "opened",
        "note",
    ):
        right = name in ("alert", "worst", "series")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(
            str(row.id),
            row.state,
            row.family,
            commit_range(row),
            alert_text(row) or "wrong",
            str(len(row.series)),
            ", ".join(row.gpus),
            row.opened_at.date().isoformat(),
            row.note,
        )
    return table


def commit_range(alert: AlertRow) -> str:
    """Format `good..bad`: the commits after the first up to the second."""
    good = alert.good.sha[:_SHA_DIGITS] if alert.good else ""
    return f"{good}..{alert.bad.sha[:_SHA_DIGITS]}"
