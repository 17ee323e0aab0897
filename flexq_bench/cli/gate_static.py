"""`flexq-bench gate static`: check a change for spills and lower occupancy, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.external import ProjectOption
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import KernelsOption, finite
from flexq_bench.cli.output import console, print_wrapped, say
from flexq_bench.cli.progress import progress
from flexq_bench.cli.reports import BaseOption, BothRevisionsOption, ReportOptions
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.repository.worktrees import repository_of
from flexq_bench.sweeps.text import split_names

if TYPE_CHECKING:
    from flexq_bench.ci.gate_static import StaticReport


@takes_option_groups
def static(
    *,
    base: BaseOption,
    head: Annotated[
        str, typer.Option(metavar="REV", help="Revision to judge; . is the working tree.")
    ] = "HEAD",
    repository: BothRevisionsOption = Path(),
    kernels: KernelsOption = None,
    targets: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Architectures: sm_86,sm_90. Default: sm_80 to sm_120."),
    ] = None,
    max_occupancy_loss: Annotated[
        float,
        typer.Option(
            min=0,
            max=100,
            callback=finite,
            metavar="PERCENT",
            help="Largest accepted loss of resident warps per SM.",
        ),
    ] = 0.0,
    max_instruction_growth: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e6,
            callback=finite,
            metavar="PERCENT",
            help="Largest accepted growth of any kind of instruction. Default: only report it.",
        ),
    ] = None,
    project: ProjectOption = None,
    output: ReportOptions,
) -> None:
    """Compile the kernels of two revisions and compare their machine code, without a GPU.

    New spills and fewer warps per SM are regressions; other changes are reported. Sources that are
    the same in both are not compiled. Exit code 0: none; 1: a regression; 4: a build of the head
    does not compile. Of a --project, only kernels that expose their machine code are compared.
    """
    from flexq_bench.ci.gate_static import Limits
    from flexq_bench.ci.reports import static as reports
    from flexq_bench.kernels.runtime.machine_code import check_tools

    output.check()
    check_tools()
    with ended_by_terminate(), progress("compiling") as bar:
        compare = (
            _gate_of_repository(repository, base, head)
            if project is None
            else _gate_of_project(project, base, head)
        )
        report = compare(
            patterns=split_names(kernels),
            targets=split_names(targets),
            limits=Limits(max_occupancy_loss, max_instruction_growth),
            on_progress=bar.update,
        )
    output.write(report, markdown=reports.markdown, json=reports.as_json)
    out = console(stderr=output.use_stdout)
    say(out, reports.headline(report))
    table = reports.terminal(report)
    if table is not None:
        print_wrapped(out, table)
    for line in (*reports.further_lines(report), reports.coverage(report)):
        say(out, line)
    raise typer.Exit(int(report.exit_code))


def _gate_of_repository(repository: Path, base: str, head: str) -> Callable[..., StaticReport]:
    """The gate for two revisions of this repository."""
    from flexq_bench.ci.gate_static import gate_static

    return partial(gate_static, repository_of(repository), base, head)


def _gate_of_project(folder: str, base: str, head: str) -> Callable[..., StaticReport]:
    """The gate for two revisions of a project, both built according to base's project file."""
    from flexq_bench.ci.gate_static import gate_static_project
    from flexq_bench.repository.project import open_project, revision

    opened = open_project(folder)
    first, second = (revision(opened, text) for text in (base, head))
    return partial(gate_static_project, opened.at(first.checkout), first, second)
