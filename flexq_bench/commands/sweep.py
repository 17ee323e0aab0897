"""`flexq-bench sweep`: kernels on shapes that a person types, or on a model's layers."""

from __future__ import annotations

from itertools import product
from typing import Annotated, TypeVar

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
    split_sizes,
    tuning_of,
)
from flexq_bench.errors import UsageError
from workloads.case import CacheMode, Stage
from workloads.models import get_model
from workloads.names import unknown
from workloads.ranges import parse_ranges
from workloads.suite import Group, Shape, Suite, layer_shapes

_ALL_KERNELS = ("*",)
_STAGES: tuple[Stage, ...] = ("gemm", "linear")
_CACHES: tuple[CacheMode, ...] = ("cold", "hot")

Word = TypeVar("Word", Stage, CacheMode)


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

    asked = split_names(kernels)
    group = Group(
        asked or _ALL_KERNELS,
        parse_ranges(m),
        _shapes(n, k, model, layers),
        _words("stage", stage, _STAGES),
        _words("cache", cache, _CACHES),
    )
    suite = Suite("sweep", "shapes typed at the command line", "", (group,))
    tuning = tuning_of(no_tune=no_tune, retune=retune)
    fleet = measuring.FleetSetup(split_names(gpus) or (), repeat, times)
    setup = measuring.Setup(
        db, cluster, fleet, backend, device, seed, tuning, ResultFiles(as_json, out)
    )
    raise typer.Exit(measuring.measure_suite(suite, asked or (), "sweep", setup))


def _shapes(n: str | None, k: str | None, model: str | None, layers: str) -> tuple[Shape, ...]:
    if model is not None:
        if n is not None or k is not None:
            raise UsageError("--model brings its own N and K: leave out --n and --k")
        names = split_names(layers) or ("fused",)
        return layer_shapes([get_model(model)], names[0] if len(names) == 1 else names)
    ns, ks = split_sizes(n), split_sizes(k)
    if ns is None or ks is None:
        raise UsageError("which layers? Give --n and --k, or --model (see list models)")
    return tuple(Shape(a, b, layer="") for a, b in product(ns, ks))


def _words(kind: str, text: str, known: tuple[Word, ...]) -> tuple[Word, ...]:
    asked = split_names(text) or ()
    for word in asked:
        if word not in known:
            raise UsageError(unknown(kind, word, known))
    return tuple(word for word in known if word in asked)
