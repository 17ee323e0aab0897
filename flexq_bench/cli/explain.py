"""`flexq-bench explain`: an alert's evidence, with every verdict recomputed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from flexq_bench.cli.alerts import AlertArgument, commit_range
from flexq_bench.cli.options import MAX_COUNT, DbOption, JsonFlag
from flexq_bench.cli.output import console, plain, print_json, print_wrapped, say
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.queries import AlertEventRow, AlertRow, DecisionRow
from flexq_bench.exit_codes import ExitCode
from flexq_bench.packages import require_extra
from flexq_bench.runs.command_lines import command, database_arguments
from flexq_bench.runs.result_files import check_writable
from flexq_bench.workloads.case import kernel_label

if TYPE_CHECKING:
    from flexq_bench.verdicts.evidence_plot import Panel
    from flexq_bench.verdicts.recompute import Recomputed


def explain(
    alert: AlertArgument,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", help="Draw the evidence to a PNG file."),
    ] = None,
    most: Annotated[
        int,
        typer.Option("--most", min=1, max=MAX_COUNT, help="Verdicts to draw, the slowest first."),
    ] = 3,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Recompute every verdict of an alert from its stored evidence, and show the evidence.

    Exit code 0: all agree to the last bit; 5: one does not, so it can't be trusted.
    """
    from flexq_bench.verdicts.recompute import recompute

    if png is not None:
        check_writable("--png", str(png))
        require_extra("plots", "explain --png")
    with open_database(db, read_only=True) as database:
        with database.session() as session:
            row = queries.alert_by_id(session, alert)
            events = queries.alert_events(session, alert)
            recomputed = recompute(session, alert)
        panels = _panels(recomputed, most)
        if png is not None:
            from flexq_bench.verdicts.evidence_plot import write_png

            write_png(png, panels)
        wrong = [entry for entry in recomputed if entry.differences]
        if as_json:
            _print_json(row, events, recomputed)
        else:
            _print(console(), database, row, events, recomputed, panels)
    raise typer.Exit(int(ExitCode.INFRASTRUCTURE if wrong else ExitCode.PASS))


def _print_json(
    row: AlertRow, events: Sequence[AlertEventRow], recomputed: Sequence[Recomputed]
) -> None:
    decisions = [
        plain(entry.decision)
        | {
            "evidence": None if entry.evidence is None else entry.evidence.as_dict(),
            "agrees": not entry.differences,
            "differences": list(entry.differences),
        }
        for entry in recomputed
    ]
    print_json({"alert": row, "events": events, "decisions": decisions})


def _print(
    out: Console,
    database: Database,
    row: AlertRow,
    events: Sequence[AlertEventRow],
    recomputed: Sequence[Recomputed],
    panels: Sequence[Panel],
) -> None:
    from flexq_bench.results.reproduction import project_arguments
    from flexq_bench.verdicts import history_verdict
    from flexq_bench.verdicts.evidence_plot import terminal_plot

    project = f" of {row.bad.project}" if row.bad.project else ""
    say(out, f"alert {row.id}: {row.family}, {row.state}, commits {commit_range(row)}{project}")
    say(out, f"first bad: {row.bad.sha} {row.bad.subject} ({row.bad.author or 'unknown'})")
    for event in events:
        who = event.person or "flexq-bench"
        note = f": {event.note}" if event.note else ""
        say(out, f"{event.created_at:%Y-%m-%d %H:%M} UTC {event.state}, by {who}{note}")
    print_wrapped(out, _table(recomputed))
    for panel in panels:
        say(out, panel.title)
        for line in terminal_plot(panel):
            out.print(line, soft_wrap=True)
        say(out, f"{panel.confirmation.reason}; cause: {panel.confirmation.cause}")
        say(out, "")
    for entry in recomputed:
        for difference in entry.differences:
            say(out, f"{_name(entry.decision)}: {difference}")
    agree = sum(not entry.differences for entry in recomputed)
    say(out, f"{agree} of {len(recomputed)} verdicts agree with their evidence to the last bit")
    by_history = [
        entry for entry in recomputed if entry.decision.detector == history_verdict.DETECTOR
    ]
    for entry in by_history:
        say(out, f"{_name(entry.decision)}: {entry.decision.reason}")
    if by_history:
        say(out, "another tool measured it: its own benchmark finds the commit")
    elif row.good is not None and recomputed:
        arguments = database_arguments(database)
        series = str(recomputed[0].decision.series_id)
        commits = ("--good", row.good.sha[:10], "--bad", row.bad.sha[:10])
        options = project_arguments(row)
        say(out, f"find the commit: {command('bisect', series, *commits, *options, *arguments)}")


def _panels(recomputed: Sequence[Recomputed], most: int) -> list[Panel]:
    from flexq_bench.verdicts.evidence_plot import Panel

    drawn = [
        Panel(_name(entry.decision), entry.evidence.comparison, entry.confirmation)
        for entry in recomputed
        if entry.evidence is not None and entry.confirmation is not None
    ]
    return drawn[:most]


def _table(recomputed: Sequence[Recomputed]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("series", "kernel", "gpu", "change", "verdict", "cause", "machine code", "again"):
        table.add_column(name, overflow="fold", justify="right" if name == "change" else "left")
    for entry in recomputed:
        row = entry.decision
        change = "" if row.log_ratio is None else f"{math.expm1(row.log_ratio):+.2%}"
        table.add_row(
            str(row.series_id),
            _name(row),
            row.gpu,
            change,
            row.verdict,
            row.cause,
            _machine_code(entry),
            "differs" if entry.differences else "agrees",
        )
    return table


def _machine_code(entry: Recomputed) -> str:
    evidence = entry.evidence
    if evidence is None or evidence.base_binary is None or evidence.head_binary is None:
        return "unknown"
    return "same" if evidence.comparison.same_binary else "differs"


def _name(row: DecisionRow) -> str:
    label = kernel_label(row.kernel, row.variant)
    return f"{label} {row.stage} {row.cache} m{row.m}n{row.n}k{row.k}"
