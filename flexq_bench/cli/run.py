"""`flexq-bench run`: measure a suite now."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from flexq_bench.cli.cases import CaseOptions
from flexq_bench.cli.external import (
    KernelSourceOptions,
    code_with_failures,
    use_project,
    with_external,
)
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import (
    MAX_SEED,
    BriefOption,
    DbOption,
    PlaceOptions,
    RecordFileOptions,
    RegimeOption,
    TuningOptions,
    regimes_of,
)
from flexq_bench.cli.stored_options import stores_options
from flexq_bench.errors import UsageError

_TRIGGERS = ("manual", "sweep", "nightly", "gate")


@stores_options(lambda values: values["resume"])
@takes_option_groups
def run(
    *,
    suite: Annotated[
        str | None, typer.Argument(help="A suite's name (list suites) or .toml file.")
    ] = None,
    cases: CaseOptions,
    sources: KernelSourceOptions,
    regime: RegimeOption = None,
    place: PlaceOptions,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Resume this run (a prefix of its uuid)."),
    ] = None,
    from_trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --resume: trace whose counts weight the times. Default: the sweep's own.",
        ),
    ] = None,
    trigger: Annotated[
        str, typer.Option(help="Purpose of the run: manual, nightly or gate.")
    ] = "manual",
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_SEED, help="Seed of the random inputs. Default: 0."),
    ] = None,
    tuning: TuningOptions,
    brief: BriefOption = False,
    db: DbOption = None,
    output: RecordFileOptions,
) -> None:
    """Measure a suite, store each result as soon as it is there, print a table.

    Exit code 0: measured; 1: a kernel is wrong; 4: planned results are missing; 5: a case failed,
    or this machine or the database did; 130: interrupted (continue with --resume).
    """
    from flexq_bench.cli import measuring
    from flexq_bench.workloads.suites import list_suites, load_suite

    sources.use_kernels()
    opened = (
        None if sources.project is None else use_project(sources.project, builds=place.is_local)
    )
    patterns, regimes = cases.patterns or (), regimes_of(regime)
    project = None if opened is None else opened.measured
    options = measuring.RunOptions(
        db,
        replace(place.pool(seed, tuning, project, repeat=place.repeat), brief=brief),
        output.files(),
        opened=opened,
    )
    if resume is not None:
        if regimes is not None or not cases.is_empty:
            raise UsageError("--resume uses the run's own plan: leave out options that narrow it")
        trace = None if from_trace is None else measuring.read_trace(from_trace)
        options = replace(options, trace=trace)
        raise typer.Exit(measuring.resume_run(resume, suite, options))
    if from_trace is not None:
        raise UsageError("--from-trace goes with --resume, or with sweep")
    if opened is not None:
        whole = opened.suite(suite)
    elif suite is not None:
        whole = with_external(load_suite(suite), patterns)
    else:
        raise UsageError(f"which suite? There are {', '.join(list_suites())}")
    if trigger not in _TRIGGERS:
        raise UsageError(f"no trigger {trigger!r}: there are {', '.join(_TRIGGERS)}")
    selected = cases.restrict(whole)
    if regimes is not None:
        selected = selected.under(regimes)
    code = measuring.measure_suite(selected, patterns, trigger, options)
    raise typer.Exit(code_with_failures(code))
