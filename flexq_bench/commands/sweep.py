"""`flexq-bench sweep`: kernels on shapes that a person types, or on a model's layers."""

from __future__ import annotations

from typing import Annotated

import typer

from flexq_bench.commands.options import (
    BackendChoice,
    BackendOption,
    ClusterOption,
    DbOption,
    DeviceOption,
    GpusOption,
    JsonFileOption,
    KernelsOption,
    NoTuneOption,
    OutOption,
    RepeatOption,
    RetuneOption,
    TimesOption,
    split_names,
    tuning_of,
)
from flexq_bench.commands.sweep_text import parse_sweep


def sweep(
    kernels: KernelsOption = None,
    m: Annotated[
        str, typer.Option("--m", metavar="RANGES", help="Tokens: 1,2,4:64:x2.")
    ] = "1,2,4,8,16",
    n: Annotated[str | None, typer.Option("--n", metavar="RANGES", help="Output features.")] = None,
    k: Annotated[str | None, typer.Option("--k", metavar="RANGES", help="Input features.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="A model's layers, not --n and --k."),
    ] = None,
    layers: Annotated[
        str,
        typer.Option("--layers", metavar="NAMES", help="With --model: fused, separate, or names."),
    ] = "fused",
    stage: Annotated[
        str, typer.Option("--stage", metavar="STAGES", help="gemm, linear or both: gemm,linear.")
    ] = "gemm",
    cache: Annotated[
        str, typer.Option("--cache", metavar="MODES", help="cold, hot or both: cold,hot.")
    ] = "cold",
    backend: BackendOption = BackendChoice.AUTO,
    device: DeviceOption = None,
    cluster: ClusterOption = "none",
    gpus: GpusOption = None,
    repeat: RepeatOption = 1,
    times: TimesOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random inputs.")] = 0,
    no_tune: NoTuneOption = False,
    retune: RetuneOption = False,
    db: DbOption = None,
    as_json: JsonFileOption = None,
    out: OutOption = None,
) -> None:
    """Measure kernels on every combination of M, N and K, or on a model's layers.

    Exit codes as of `run`.
    """
    from flexq_bench.commands import measuring
    from flexq_bench.commands.result_files import ResultFiles

    asked = parse_sweep(
        kernels=kernels, m=m, n=n, k=k, model=model, layers=layers, stage=stage, cache=cache
    )
    tuning = tuning_of(no_tune=no_tune, retune=retune)
    fleet = measuring.FleetSetup(split_names(gpus) or (), repeat, times)
    setup = measuring.Setup(
        db, cluster, fleet, backend, device, seed, tuning, ResultFiles(as_json, out)
    )
    raise typer.Exit(measuring.measure_suite(asked.suite(), asked.kernels, "sweep", setup))
