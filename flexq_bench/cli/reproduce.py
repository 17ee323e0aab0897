"""`flexq-bench reproduce`: measure what a paper's table needs, and set ours beside its numbers."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flexq_bench.cli.options import DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.db.engine import open_database
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.names import unknown
from flexq_bench.workloads.published import (
    Figure,
    Paper,
    PublishedTable,
    get_paper,
    published_papers,
    select_tables,
)

if TYPE_CHECKING:
    from flexq_bench.results.papers.evidence import Evidence
    from flexq_bench.results.papers.statements import StatementResult
    from flexq_bench.results.papers.steps import Step
    from flexq_bench.results.papers.tables import TableResult

_FEW_ROWS = 60  # of a table in the terminal; the dashboard shows all


def reproduce(
    *,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAPER[/TABLE]]",
            help="flexq, flexq/table-6, atom/figure-11. Default: list all.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="FOLDER", help="The model of accuracy tables.")
    ] = "",
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=][KIND:]PATH",
            help="Texts, as of `accuracy`, by the tables' names: wikitext2, c4; repeatable.",
        ),
    ] = None,
    task_data: Annotated[
        str, typer.Option(metavar="DIR", help="Data of the zero-shot tasks, as of `accuracy`.")
    ] = "",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of predicted tokens of each text.")
    ] = None,
    calibration: Annotated[
        str, typer.Option(metavar="[KIND:]PATH", help="The text that schemes are calibrated on.")
    ] = "",
    no_tune: Annotated[
        bool, typer.Option("--no-tune", help="Kernels: do not autotune, as of `run`.")
    ] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Times to a few percent, as of `run` and `decode`.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands that are left, run none.")
    ] = False,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure what published tables need; print their numbers beside ours, with a verdict.

    What is stored of this machine's GPU, or of the model, is not measured again: the same command
    resumes. Tables of kernels and of whole models (random weights of true sizes) need a GPU, tables
    of accuracy a model. Without a name all tables and figures are listed with their verdicts.

    Exit code 0: done, or there is nothing to run here; otherwise that of the command that failed.
    """
    from flexq_bench.measure.local_devices import local_devices
    from flexq_bench.results.papers.steps import AccuracyInputs, steps_of, why_not_here

    entries = _entries(what)
    inputs = AccuracyInputs(model, _named_texts(data or ()), task_data, max_tokens, calibration)
    gpus = [info.sku for _, info in local_devices() if info.backend == "cuda"]
    gpu = gpus[0] if gpus else ""
    if what is not None:
        for paper, entry in entries:
            why = why_not_here(paper, entry, gpu, model)
            if why:
                say(console(stderr=True), f"{paper.key}/{entry.id} can't be run here since {why}")
                continue
            for step in steps_of(paper, entry, _evidence(db), gpu, inputs):
                given = {"--no-tune": no_tune, "--brief": brief}
                flags = [flag for flag, is_given in given.items() if is_given]
                code = _run(step, entry, db, flags, dry_run=dry_run)
                if code:
                    raise typer.Exit(code)
    _report(entries, _evidence(db), as_json=as_json, is_one="/" in (what or ""))
    raise typer.Exit(ExitCode.PASS)


def _named_texts(data: Sequence[str]) -> tuple[str, ...]:
    """Return texts with their names. Raises UsageError for one that no table has."""
    from flexq_bench.accuracy.texts import read_text
    from flexq_bench.results.papers.steps import TEXT_NAMES

    named = []
    for spec in data:
        is_of_hub = spec in TEXT_NAMES and not Path(spec).exists()
        name = spec if is_of_hub else read_text(spec).name
        if name not in TEXT_NAMES:
            path = spec.rpartition("=")[2]
            reason = unknown("text of a table", name, sorted(TEXT_NAMES))
            raise UsageError(f"{reason}: name it, as wikitext2={path}")
        named.append(spec if is_of_hub or "=" in spec else f"{name}={spec}")
    return tuple(named)


def _entries(what: str | None) -> list[tuple[Paper, PublishedTable | Figure]]:
    """Return the tables, and figures that are measured, of a name; all. Raises WorkloadError."""
    from flexq_bench.results.papers.steps import named_figures

    if what is None:
        return [*select_tables(None), *named_figures(published_papers())]
    key, _, part = what.partition("/")
    paper = get_paper(key)
    named = [(paper, figure) for figure in paper.figure if figure.id == part]
    figures = named if part else named_figures([paper])
    tables = [(p, table) for p, table in select_tables(key) if part in ("", table.id)]
    if not tables and not figures:
        ids = [*(table.id for table in paper.table), *(figure.id for figure in paper.figure)]
        raise WorkloadError(unknown(f"table of {key}", part, ids))
    return [*tables, *figures]


def _evidence(db: str | None) -> Evidence:
    from flexq_bench.results.papers.evidence import read_evidence

    with open_database(db) as database, database.session() as session:
        return read_evidence(session)


def _run(
    step: Step,
    entry: PublishedTable | Figure,
    db: str | None,
    flags: Sequence[str],
    *,
    dry_run: bool,
) -> int:
    """Run a command of this program; returns its exit code. flags: of `run` and `decode`."""
    with tempfile.TemporaryDirectory(prefix="flexq-bench-") as folder:
        arguments = list(step.arguments)
        if step.suite:
            name = getattr(entry, "suite", "") or entry.id
            file = Path(folder) / f"{name}.toml"
            file.write_text(step.suite, encoding="utf-8")
            arguments.append(str(file))
        if arguments[0] in ("run", "decode"):
            arguments += flags
        arguments += ["--db", db] if db else []
        shown = shlex.join(("flexq-bench", *step.arguments))
        say(console(stderr=True), f"{entry.id}: {shown}")
        if dry_run:
            return 0
        return subprocess.run([sys.executable, "-m", "flexq_bench", *arguments]).returncode


def _report(
    entries: Sequence[tuple[Paper, PublishedTable | Figure]],
    evidence: Evidence,
    *,
    as_json: bool,
    is_one: bool,
) -> None:
    from flexq_bench.results.papers.statements import is_of, statement_result
    from flexq_bench.results.papers.tables import table_result

    results = [
        table_result(paper, entry, evidence)
        for paper, entry in entries
        if isinstance(entry, PublishedTable)
    ]
    keys = {paper.key for paper, _ in entries}
    stated = [
        statement_result(paper, statement, evidence)
        for paper in published_papers()
        for statement in paper.statement
        if paper.key in keys
    ]
    if as_json:
        print_json(
            {
                "tables": [_as_plain(result) for result in results],
                "statements": [
                    {
                        "id": f"{s.paper.key}/{s.statement.id}",
                        "kind": s.kind,
                        "verdict": s.verdict,
                        "ours": None if s.measured is None else s.measured.value,
                    }
                    for s in stated
                ],
            }
        )
        return
    for result in results:
        if is_one:
            _print_table(result)
        say(console(), f"{result.name}: {result.verdict}")
        for caveat in result.table.caveats if is_one else ():
            say(console(), f"  caveat: {caveat}")
        for mismatch in result.paper.mismatches(result.table) if is_one else ():
            say(console(), f"  mismatch: {mismatch.where}: {mismatch.about}")
    for paper, entry in entries:
        about = [s for s in stated if s.paper is paper and is_of(s.statement, entry)]
        if isinstance(entry, Figure):
            text = f"stated: {entry.stated}" if is_one else _counts(about)
            say(console(), f"{paper.key}/{entry.id}: {entry.shows}; {text}")
        if is_one:
            _print_statements(about)
    if not is_one:
        measurable = [s for s in stated if s.statement.ours is not None]
        say(console(), f"statements that something here can measure: {_counts(measurable)}")


def _counts(results: Iterable[StatementResult]) -> str:
    counts = Counter(result.kind for result in results)
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "none stated"


def _print_statements(results: Iterable[StatementResult]) -> None:
    """Print what the text states about a table or figure, and ours."""
    for result in results:
        stated, measured = result.statement, result.measured
        over = f" over {stated.baseline}" if stated.baseline else ""
        over += f", {stated.of}" if stated.of else ""
        bound = f"{stated.bound} " if stated.bound else ""
        ours = "" if measured is None else f"; ours {measured.text}"
        say(
            console(),
            f"  {stated.where}: {stated.metric} of {stated.subject}{over}: {bound}{stated.text}"
            f"{ours}: {result.verdict}",
        )
        for name, text in (("caveat", stated.caveat), ("its own tables", stated.check)):
            if text:
                say(console(), f"    {name}: {text}")


def _as_plain(result: TableResult) -> dict[str, object]:
    return {
        "table": result.name,
        "kind": result.kind,
        "verdict": result.verdict,
        "gpu": result.gpu,
        "cells": [
            {**cell.at, "metric": cell.metric, "printed": cell.value, "ours": ours.value}
            for cell, ours in result.cells
        ],
    }


def _print_table(result: TableResult) -> None:
    """Print the numbers of which ours are known, at most _FEW_ROWS, and mean speed-ups."""
    from flexq_bench.results.papers.tables import averages

    known = [(c, ours) for c, ours in result.cells if None not in (c.value, ours.value)]
    shown = Table("what", "metric", "printed", "ours", "bandwidth theirs", "ours", box=None)
    for cell, ours in known[:_FEW_ROWS]:
        place = " ".join(str(value) for value in cell.at.values())
        shares = ("" if s is None else f"{s:.0%}" for s in (ours.their_share, ours.share))
        shown.add_row(
            place, f"{cell.metric} {cell.unit}", f"{cell.value:g}", f"{ours.value:.5g}", *shares
        )
    if known:
        console().print(shown)
    if len(known) > _FEW_ROWS:
        say(console(), f"and {len(known) - _FEW_ROWS} more: see the dashboard's Paper page")
    means = Table(
        "mean speed-up", "over", "of", "printed", "geometric", "ours", "geometric", box=None
    )
    for mean in averages(result):
        both = (*mean.theirs, *(mean.ours or ()))
        means.add_row(mean.subject, mean.over, str(mean.count), *(f"{value:.3f}" for value in both))
    if means.rows:
        console().print(means)
