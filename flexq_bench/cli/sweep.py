"""`flexq-bench sweep`: measure kernels on given shapes, or on those of a model or a run."""

from __future__ import annotations

from typing import Annotated

import typer

from flexq_bench.cli.options import (
    BackendChoice,
    BackendOption,
    ClusterOption,
    DbOption,
    DeviceOption,
    GpusOption,
    JsonFileOption,
    KernelsFromOption,
    KernelsOption,
    NoTuneOption,
    OutOption,
    RegimeOption,
    RepeatOption,
    RetuneOption,
    SeedOption,
    TimesOption,
    regimes_of,
    tuning_of,
)
from flexq_bench.cli.output import say
from flexq_bench.cli.size_files import sizes_of
from flexq_bench.errors import UsageError
from flexq_bench.sweeps.text import parse_sweep, split_names
from flexq_bench.workloads.model_spec import LayerShape
from flexq_bench.workloads.suite import Shape


def sweep(
    kernels: KernelsOption = None,
    kernels_from: KernelsFromOption = None,
    m: Annotated[
        str | None,
        typer.Option(
            "--m",
            metavar="RANGES",
            help="Tokens: 1,2,4:64:x2, or @FILE with such. Default: 1,2,4,8,16.",
            show_default=False,
        ),
    ] = None,
    n: Annotated[str | None, typer.Option("--n", metavar="RANGES", help="Output features.")] = None,
    k: Annotated[str | None, typer.Option("--k", metavar="RANGES", help="Input features.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="A model's layers, not --n and --k."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="PATH",
            help="The layers of a Hugging Face config.json, or of a folder with one.",
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            "--layers",
            metavar="NAMES",
            help="With --model: fused, separate, or names. With --config: names.",
        ),
    ] = "fused",
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="RUN",
            help="The cases of this run (its uuid's beginning); --kernels and --m replace its own.",
        ),
    ] = None,
    stage: Annotated[
        str, typer.Option("--stage", metavar="STAGES", help="gemm, linear or both: gemm,linear.")
    ] = "gemm",
    cache: Annotated[
        str, typer.Option("--cache", metavar="MODES", help="cold, hot or both: cold,hot.")
    ] = "cold",
    regime: RegimeOption = None,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw times over M as a .png file.")
    ] = None,
    queue: Annotated[
        bool,
        typer.Option("--queue", help="Have `flexq-bench worker` measure it, wherever one runs."),
    ] = False,
    backend: BackendOption = BackendChoice.AUTO,
    device: DeviceOption = None,
    cluster: ClusterOption = "none",
    gpus: GpusOption = None,
    repeat: RepeatOption = 1,
    times: TimesOption = None,
    seed: SeedOption = 0,
    no_tune: NoTuneOption = False,
    retune: RetuneOption = False,
    db: DbOption = None,
    as_json: JsonFileOption = None,
    out: OutOption = None,
) -> None:
    """Measure kernels on combinations of M, N and K, a model's layers, or the cases of a run.

    --config takes any language model that transformers knows, also the text decoder of a multimodal
    model, and builds it without weights; experts count once, and the output head and routers are
    left out. A model of unknown type is read as LLaMA if it has LLaMA's sizes, else refused.

    The expected time is printed first, if similar cases were measured before. Results are stored
    like any others and never become a baseline. Exit codes as of `run`.
    """
    from flexq_bench.cli import measuring
    from flexq_bench.cli.external import code_with_failures, sweep_patterns, use_kernels_from
    from flexq_bench.fleet import PoolOptions
    from flexq_bench.runs.result_files import ResultFiles

    use_kernels_from(kernels_from, only=kernels is None)
    patterns, regimes = sweep_patterns(split_names(kernels)), regimes_of(regime)
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
    )
    files = ResultFiles(as_json, out, plot)
    options = measuring.RunOptions(db, pool, files, streams=True)
    if like is not None:
        if n is not None or k is not None or model is not None or config is not None or queue:
            raise UsageError(
                "--like has the run's own shapes: drop --n, --k, --model, --config and --queue"
            )
        from flexq_bench.cli.sweep_like import suite_like

        suite = suite_like(like, patterns, sizes_of("--m", m), db)
    else:
        of_config = _of_config(config, layers)
        named = None if patterns is None else ",".join(patterns)
        chosen = parse_sweep(
            kernels=named, m=sizes_of("--m", m), n=sizes_of("--n", n), k=sizes_of("--k", k),
            model=model, layers=layers, stage=stage, cache=cache,
            shapes=tuple(Shape(layer.n, layer.k, layer.name) for layer in of_config),
        )  # fmt: skip
        for layer in of_config:
            size = f"{layer.n}x{layer.k}"
            say(options.people, f"{layer.name}: {size}, {layer.count} in the model")
        if queue:
            if regimes not in (None, ("boost",)):
                raise UsageError("--queue measures under boost only: leave --regime or --queue out")
            from flexq_bench.cli.sweep_like import queue_sweep

            queue_sweep(chosen, options)
            raise typer.Exit(0)
        suite = chosen.suite()
    if regimes is not None:
        suite = suite.under(regimes)
    code = measuring.measure_suite(suite, patterns or (), "sweep", options)
    raise typer.Exit(code_with_failures(code))


def _of_config(config: str | None, names: str) -> tuple[LayerShape, ...]:
    """The layers with these names of a configuration; empty without --config."""
    if config is None:
        return ()
    from flexq_bench.model_configs.layers import chosen_layers, layers_of_config

    return chosen_layers(layers_of_config(config), split_names(names) or ())
