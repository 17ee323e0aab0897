"""`flexq-bench gate static`: does a change spill registers or lower occupancy? Needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flexq_bench.cli.options import KernelsOption, split_names
from flexq_bench.cli.output import console, plain, say, show_by_words
from flexq_bench.cli.report_files import (
    STDOUT,
    JsonReportOption,
    MarkdownOption,
    check_folders,
    write_reports,
)
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.interrupts import ended_by_terminate

if TYPE_CHECKING:
    from flexq_bench.measure.machine_code.comparison import OnProgress, StaticReport


def static(
    base: Annotated[str, typer.Option("--base", metavar="REV", help="What to compare with.")],
    head: Annotated[
        str, typer.Option("--head", metavar="REV", help="What to judge; . is the working tree.")
    ] = "HEAD",
    repository: Annotated[
        Path, typer.Option("--repository", metavar="FOLDER", help="The git tree that has both.")
    ] = Path(),
    kernels: KernelsOption = None,
    targets: Annotated[
        str | None,
        typer.Option(
            "--targets",
            metavar="NAMES",
            help="Architectures: sm_86,sm_90. Default: all of the fleet.",
            show_default=False,
        ),
    ] = None,
    max_occupancy_loss: Annotated[
        float,
        typer.Option(
            "--max-occupancy-loss",
            min=0,
            max=100,
            metavar="PERCENT",
            help="Of the warps that an SM holds.",
        ),
    ] = 0.0,
    max_instruction_growth: Annotated[
        float | None,
        typer.Option(
            "--max-instruction-growth",
            min=0,
            metavar="PERCENT",
            help="Of any kind of instruction. Default: growth is only reported.",
            show_default=False,
        ),
    ] = None,
    markdown: MarkdownOption = None,
    as_json: JsonReportOption = None,
) -> None:
    """Compile the kernels of two revisions and compare what became of them, without a GPU.

    A spill that is new and fewer warps an SM are regressions; all else is reported. Sources that
    are the same in both are not compiled. Exit code 0: none; 1: a regression; 4: a build of the
    head does not compile.
    """
    from flexq_bench.measure.machine_code.comparison import compare_revisions
    from flexq_bench.measure.machine_code.limits import Limits
    from flexq_bench.measure.machine_code.report import as_markdown
    from flexq_bench.repository.worktrees import repository_of

    files = {"--markdown": markdown, "--json": as_json}
    check_folders(files)
    wanted = _targets(targets)
    with ended_by_terminate(), _progress() as on_progress:
        report = compare_revisions(
            repository_of(repository),
            base,
            head,
            patterns=split_names(kernels),
            targets=wanted,
            limits=Limits(max_occupancy_loss, max_instruction_growth),
            on_progress=on_progress,
        )
    write_reports(report, files, {"--markdown": as_markdown, "--json": _json})
    _print(report, console(stderr=STDOUT in files.values()))
    raise typer.Exit(int(_exit_code(report)))


def _targets(text: str | None) -> tuple[str, ...]:
    from kernels.runtime.occupancy import TARGETS
    from workloads.names import unknown

    asked = split_names(text) or TARGETS
    for target in asked:
        if target not in TARGETS:
            raise UsageError(unknown("target", target, TARGETS))
    return tuple(target for target in TARGETS if target in asked)


def _exit_code(report: StaticReport) -> ExitCode:
    # First whether everything planned is there, as in every gate.
    if report.broken:
        return ExitCode.MISSING
    return ExitCode.REGRESSION if report.is_regression else ExitCode.PASS


def _print(report: StaticReport, out: Console) -> None:
    from flexq_bench.measure.machine_code.report import (
        coverage,
        further_lines,
        headline,
        regressions_table,
    )

    say(out, headline(report))
    table = regressions_table(report)
    if table is not None:
        show_by_words(out, table)
    for line in (*further_lines(report), coverage(report)):
        say(out, line)


def _json(report: StaticReport) -> str:
    from flexq_bench.measure.machine_code.report import headline

    said = {"verdict": headline(report), "exit_code": int(_exit_code(report))}
    return json.dumps(plain(report) | said, indent=2, ensure_ascii=False) + "\n"


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """A bar on stderr while it compiles; only a person at a terminal sees it."""
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    err = console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
