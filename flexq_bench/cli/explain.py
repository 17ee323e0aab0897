"""`flexq-bench explain`: an alert's verdicts as decided, their evidence, and today's answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from flexq_bench.workloads.case import kernel_label, stored_case

if TYPE_CHECKING:
    from flexq_bench.verdicts.evidence_plot import Panel
    from flexq_bench.verdicts.recompute import Explained


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
    """Show every verdict of an alert as it was decided, its evidence, and what today's rules say.

    Exit code 0, also if today's rules differ; 5: a verdict or its evidence was changed since, so it
    can't be trusted.
    """
    from flexq_bench.verdicts.recompute import explain_alert

    if png is not None:
        check_writable("--png", str(png))
        require_extra("plots", "explain --png")
    with open_database(db, read_only=True) as database:
        with database.session() as session:
            row = queries.alert_by_id(session, alert)
            events = queries.alert_events(session, alert)
            explained = explain_alert(session, alert)
        panels = _panels(explained, most)
        if png is not None:
            from flexq_bench.verdicts.evidence_plot import write_png

            write_png(png, panels)
        wrong = [entry for entry in explained if entry.problem]
        if as_json:
            _print_json(row, events, explained)
        else:
            _print(console(), database, row, events, explained, panels)
    raise typer.Exit(int(ExitCode.INFRASTRUCTURE if wrong else ExitCode.PASS))


def _print_json(
    row: AlertRow, events: Sequence[AlertEventRow], explained: Sequence[Explained]
) -> None:
    decisions = [
        plain(entry.decision)
        | {
            "evidence": entry.raw,
            "problem": entry.problem,
            "today": plain(entry.again),
            "agrees": entry.again is not None and not entry.again.differences,
        }
        for entry in explained
    ]
    print_json({"alert": row, "events": events, "decisions": decisions})


def _print(
    out: Console,
    database: Database,
    row: AlertRow,
    events: Sequence[AlertEventRow],
    explained: Sequence[Explained],
    panels: Sequence[Panel],
) -> None:
    from flexq_bench.results.alert_commands import is_one_step, project_arguments
    from flexq_bench.verdicts import history_verdict
    from flexq_bench.verdicts.evidence_plot import terminal_plot

    project = f" of {row.bad.project}" if row.bad.project else ""
    say(out, f"alert {row.id}: {row.family}, {row.state}, commits {commit_range(row)}{project}")
    say(out, f"first bad: {row.bad.sha} {row.bad.subject} ({row.bad.author or 'unknown'})")
    for event in events:
        who = event.person or "flexq-bench"
        note = f": {event.note}" if event.note else ""
        say(out, f"{event.created_at:%Y-%m-%d %H:%M} UTC {event.state}, by {who}{note}")
    say(out, "as decided:")
    print_wrapped(out, _table(explained))
    for panel in panels:
        say(out, panel.title)
        for row_of_plot in terminal_plot(panel):
            out.print(row_of_plot, soft_wrap=True)
        say(out, f"{panel.confirmation.reason}; cause: {panel.confirmation.cause}")
        say(out, "")
    drawn = {(panel.title, panel.confirmation.reason) for panel in panels}
    for entry in explained:
        name = _name(entry.decision)
        if (name, entry.decision.reason) not in drawn:
            say(out, f"{name}: {entry.decision.reason}")
    for rule in dict.fromkeys(entry.decision.rule for entry in explained):
        say(out, f"rule: {rule or 'not stored by the version that decided'}")
    for line in _problems_and_todays_answers(explained):
        say(out, line)
    if any(entry.decision.detector == history_verdict.DETECTOR for entry in explained):
        say(out, "another tool measured it: its own benchmark finds the commit")
    elif is_one_step(row):
        say(out, "no commit lies between the last good and the first bad one: it is the latter")
    elif row.good is not None and explained:
        arguments = database_arguments(database)
        series = str(explained[0].decision.series_id)
        commits = ("--good", row.good.sha[:10], "--bad", row.bad.sha[:10])
        options = project_arguments(row)
        say(out, f"find the commit: {command('bisect', series, *commits, *options, *arguments)}")


def _problems_and_todays_answers(explained: Sequence[Explained]) -> Iterator[str]:
    for entry in explained:
        if entry.problem:
            yield f"{_name(entry.decision)}: don't trust it: {entry.problem}"
    answers = [(entry, entry.again) for entry in explained if entry.again is not None]
    agree = sum(not again.differences for _, again in answers)
    yield (
        f"recomputed with the rules of this version: {agree} of {len(explained)} verdicts are the "
        "same to the last bit"
    )
    for entry, again in answers:
        if again.differences:
            yield (
                f"{_name(entry.decision)}: {again.rules} says {again.verdict or 'nothing'}, "
                f"{again.reason} ({'; '.join(again.differences)})"
            )
    unreadable = len(explained) - len(answers)
    if unreadable:
        yield f"{unreadable} can't be recomputed: this version has no rules for their evidence"


def _panels(explained: Sequence[Explained], most: int) -> list[Panel]:
    from flexq_bench.verdicts.evidence_plot import Panel

    drawn = [
        Panel(_name(entry.decision), entry.evidence.comparison, entry.conclusion)
        for entry in explained
        if entry.evidence is not None
    ]
    return drawn[:most]


def _table(explained: Sequence[Explained]) -> Table:
    from flexq_bench.verdicts.texts import decision_text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        *("series", "kernel", "gpu", "change", "verdict", "cause", "machine code", "decided by"),
        "evidence",
    ):
        table.add_column(name, overflow="fold", justify="right" if name == "change" else "left")
    for entry in explained:
        row = entry.decision
        table.add_row(
            str(row.series_id),
            _name(row),
            row.gpu,
            decision_text(row) or "",
            row.verdict,
            row.cause,
            _machine_code(entry),
            f"{row.detector} {row.detector_version}",
            "changed" if entry.problem else "intact",
        )
    return table


def _machine_code(entry: Explained) -> str:
    evidence = entry.evidence
    if evidence is None or evidence.base_binary is None or evidence.head_binary is None:
        return "unknown"
    return "same" if evidence.comparison.same_binary else "differs"


def _name(row: DecisionRow) -> str:
    label = kernel_label(row.kernel, row.variant)
    return stored_case(label, row.stage, row.cache, row.operation, row.shape)
