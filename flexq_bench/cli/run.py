"""`flexq-bench run`: measure a suite now."""

from __future__ import annotations

from typing import Annotated

import typer

from flexq_bench.cli.options import (
    LARGEST_SEED,
    BackendChoice,
    BackendOption,
    CacheOption,
    ClusterOption,
    DbOption,
    DeviceOption,
    GpusOption,
    JsonFileOption,
    KernelsFromOption,
    KernelsOption,
    LayersOption,
    ModelsOption,
    NoTuneOption,
    OutOption,
    ProjectOption,
    RegimeOption,
    RepeatOption,
    RetuneOption,
    SizesOption,
    StageOption,
    TimesOption,
    regimes_of,
    restrictions_of,
    tuning_of,
)
from flexq_bench.errors import UsageError
from flexq_bench.sweeps.text import split_names, split_sizes


def run(
    suite: Annotated[
        str | None, typer.Argument(help="A suite's name (list suites) or .toml file.")
    ] = None,
    models: ModelsOption = None,
    m: SizesOption = None,
    kernels: KernelsOption = None,
    kernels_from: KernelsFromOption = None,
    project: ProjectOption = None,
    layers: LayersOption = None,
    stage: StageOption = None,
    cache: CacheOption = None,
    regime: RegimeOption = None,
    backend: BackendOption = BackendChoice.AUTO,
    device: DeviceOption = None,
    cluster: ClusterOption = "none",
    gpus: GpusOption = None,
    repeat: RepeatOption = 1,
    times: TimesOption = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Resume this run (a prefix of its uuid)."),
    ] = None,
    trigger: Annotated[
        str, typer.Option("--trigger", help="Purpose of the run: manual, nightly or gate.")
    ] = "manual",
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, max=LARGEST_SEED, help="Seed of the random inputs. Default: 0."
        ),
    ] = None,
    no_tune: NoTuneOption = False,
    retune: RetuneOption = False,
    db: DbOption = None,
    as_json: JsonFileOption = None,
    out: OutOption = None,
) -> None:
    """Measure a suite, store each result as soon as it is there, print a table.

    Exit code 0: measured; 1: a kernel is wrong; 4: planned results are missing; 5: a case failed,
    or this machine or the database did; 130: interrupted (continue with --resume).
    """
    from flexq_bench.cli import measuring
    from flexq_bench.cli.external import (
        code_with_failures,
        known_patterns,
        use_kernels_from,
        with_external,
    )
    from flexq_bench.cli.project import refuse_beside_project, use_project
    from flexq_bench.fleet import PoolOptions
    from flexq_bench.runs.result_files import ResultFiles
    from flexq_bench.workloads.suites import list_suites, load_suite

    restrictions = restrictions_of(
        models=models, layers=layers, kernels=kernels, stage=stage, cache=cache
    )
    use_kernels_from(kernels_from)
    opened = None
    if project is not None:
        refuse_beside_project(kernels_from=kernels_from)
        opened = use_project(project)
    restrictions["kernels"] = known_patterns(restrictions["kernels"])
    sizes, regimes = split_sizes(m), regimes_of(regime)
    tuning = tuning_of(no_tune=no_tune, retune=retune)
    pool = PoolOptions(
        cluster,
        measuring.backend_of(backend),
        device,
        seed,
        tuning,
        split_names(gpus) or (),
        repeat,
        times,
        None if opened is None else opened.project,
    )
    options = measuring.RunOptions(
        db,
        pool,
        ResultFiles(as_json, out),
        commit=None if opened is None else opened.revision.commit,
    )
    if resume is not None:
        narrowing = (sizes, regimes, *restrictions.values())
        if any(value is not None for value in narrowing):
            raise UsageError("--resume uses the run's own plan: leave out options that narrow it")
        raise typer.Exit(measuring.resume_run(resume, suite, options))
    if suite is None and opened is None:
        raise UsageError(f"which suite? There are {', '.join(list_suites())}")
    patterns = restrictions["kernels"] or ()
    named = (
        with_external(load_suite(suite or ""), patterns) if opened is None else opened.suite(suite)
    )
    chosen = named.restrict(m=sizes, **restrictions)
    if regimes is not None:
        chosen = chosen.under(regimes)
    code = measuring.measure_suite(chosen, patterns, _check_trigger(trigger), options)
    raise typer.Exit(code_with_failures(code))


def _check_trigger(trigger: str) -> str:
    known = ("manual", "sweep", "nightly", "gate")
    if trigger not in known:
        raise UsageError(f"no trigger {trigger!r}: there are {', '.join(known)}")
    return trigger
