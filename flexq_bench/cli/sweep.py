"""`flexq-bench sweep`: measure kernels on given shapes, or on those of a model or a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.cases import layers_of_option
from flexq_bench.cli.external import (
    KernelSourceOptions,
    code_with_failures,
    sweep_patterns,
    use_project,
)
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import (
    DbOption,
    KernelsOption,
    PlaceOptions,
    RecordFileOptions,
    RegimeOption,
    SeedOption,
    TuningOptions,
    regimes_of,
)
from flexq_bench.cli.output import say
from flexq_bench.cli.stored_options import stores_options
from flexq_bench.db.engine import open_database
from flexq_bench.errors import UsageError
from flexq_bench.runs.command_lines import command, database_arguments, user_name
from flexq_bench.runs.text_files import read_text
from flexq_bench.sweeps.launches import launch_suite, summary_lines
from flexq_bench.sweeps.stored_cases import suite_like
from flexq_bench.sweeps.text import operation_sweep, parse_sweep, split_names, split_sizes
from flexq_bench.workloads.ranges import parse_lines
from flexq_bench.workloads.suite import Shape, Suite

if TYPE_CHECKING:
    from flexq_bench.cli.measuring import RunOptions
    from flexq_bench.sweeps.sweep import Sweep

_MAX_SIZE_FILE_BYTES = 1 << 20  # ten times that of the largest number of sizes, 10,000


@dataclass(frozen=True)
class SweptCases:
    """Cases of a sweep: an operation and its sizes, or those of a model, a run or a trace."""

    m: Annotated[
        str | None,
        typer.Option(
            metavar="RANGES", help="Tokens: 1,2,4:64:x2, or @FILE with such. Default: 1,2,4,8,16."
        ),
    ] = None
    n: Annotated[str | None, typer.Option(metavar="RANGES", help="Output features.")] = None
    k: Annotated[str | None, typer.Option(metavar="RANGES", help="Input features.")] = None
    operation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="An operation other than linear, with --parameter."),
    ] = None
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES", help="With --operation: heads=32, context=1024:8192:x2."
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A model's layers, not --n and --k."),
    ] = None
    config: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="The layers of a Hugging Face config.json, or of a folder with one.",
        ),
    ] = None
    layers: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="With --model: fused, separate, or names. With --config: names."
        ),
    ] = "fused"
    like: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="The cases of this run (its uuid's beginning); --kernels and --m replace its own.",
        ),
    ] = None
    from_trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What a program launched: a trace of torch.profiler, or of FlashInfer-Bench.",
        ),
    ] = None
    most: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --from-trace: only the N workloads with most time."
        ),
    ] = None
    stage: Annotated[
        str, typer.Option(metavar="STAGES", help="gemm, linear or both: gemm,linear.")
    ] = "gemm"
    cache: Annotated[str, typer.Option(metavar="MODES", help="cold, hot or both: cold,hot.")] = (
        "cold"
    )

    def check(self, *, queue: bool) -> None:
        """Raise UsageError for options that exclude each other."""
        if self.parameter and self.operation is None:
            raise UsageError("--parameter goes with --operation: flexq-bench list operations")
        if self.most is not None and self.from_trace is None:
            raise UsageError("--most goes with --from-trace")
        shape = (self.n, self.k, self.model, self.config)
        is_shaped = any(value is not None for value in shape)
        with_m = is_shaped or self.m is not None
        if self.from_trace is not None:
            if with_m or queue or self.like is not None or self.operation is not None:
                raise UsageError(
                    "--from-trace has its own shapes: drop --m, --n, --k, --model, --config, "
                    "--like, --operation and --queue"
                )
        elif self.like is not None and (is_shaped or queue):
            raise UsageError(
                "--like has the run's own shapes: drop --n, --k, --model, --config and --queue"
            )
        elif self.like is None and self.operation is not None and with_m:
            raise UsageError(
                "--operation has --parameter: drop --m, --n, --k, --model and --config"
            )


@stores_options()
@takes_option_groups
def sweep(
    *,
    kernels: KernelsOption = None,
    sources: KernelSourceOptions,
    cases: SweptCases,
    regime: RegimeOption = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw times over M as a .png file.")
    ] = None,
    queue: Annotated[
        bool,
        typer.Option("--queue", help="Have `flexq-bench worker` measure it, wherever one runs."),
    ] = False,
    place: PlaceOptions,
    seed: SeedOption = 0,
    tuning: TuningOptions,
    db: DbOption = None,
    output: RecordFileOptions,
) -> None:
    """Measure kernels on M, N and K, a model's layers, a run's cases, or a trace.

    --config takes any language model that transformers knows, also the text decoder of a multimodal
    model, and builds it without weights; experts count once, and the output head and routers are
    left out. A model of unknown type is read as LLaMA if it has LLaMA's sizes, else refused.

    --from-trace takes operations, shapes and counts of a running server: a file of torch.profiler
    with record_shapes=True (.json, .json.gz), or a FlashInfer-Bench trace set. Times are also
    printed weighted by the counts: what a step of that server takes with each kernel.

    The expected time is printed first, if similar cases were measured before. Results are stored
    like any others and never become a baseline. Exit codes as of `run`.
    """
    from flexq_bench.cli import measuring

    sources.use_kernels(only=kernels is None)
    opened = None
    if sources.project is not None:
        if queue:
            raise UsageError("--queue is for kernels of this program: leave out --project")
        opened = use_project(sources.project, builds=place.is_local)
        kernels = kernels or f"{opened.project.name}.*"
    patterns, regimes = sweep_patterns(split_names(kernels)), regimes_of(regime)
    options = measuring.RunOptions(
        db,
        place.pool(seed, tuning, None if opened is None else opened.measured, repeat=place.repeat),
        output.files(plot),
        True,
        opened,
    )
    cases.check(queue=queue)
    if cases.from_trace is not None:
        suite, options = _suite_of_trace(cases.from_trace, cases, patterns, options)
    elif cases.like is not None:
        with open_database(db, create=False) as database, database.session() as session:
            suite = suite_like(session, cases.like, patterns, _sizes("--m", cases.m))
    else:
        shapes = _shapes(cases, patterns, options)
        if queue:
            if regimes not in (None, ("boost",)):
                raise UsageError("--queue measures under boost only: leave --regime or --queue out")
            _queue(shapes, options)
            return
        suite = shapes.suite()
    if regimes is not None:
        suite = suite.under(regimes)
    code = measuring.measure_suite(suite, patterns or (), "sweep", options)
    raise typer.Exit(code_with_failures(code))


def _sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    """Parse ranges, or `@FILE` with ranges separated by commas or white space. None: not given.

    Raises UsageError if the file can't be read, WorkloadError for an invalid range.
    """
    if text is None or not text.startswith("@"):
        return split_sizes(text)
    content = read_text(text[1:], "a file of sizes", most_bytes=_MAX_SIZE_FILE_BYTES)
    return parse_lines(content.splitlines(), f"{option} {text}")


def _shapes(cases: SweptCases, kernels: Sequence[str] | None, options: RunOptions) -> Sweep:
    """Return the sweep of an operation, of given shapes or a model's layers. Raises UsageError."""
    if cases.operation is not None:
        named = cases.operation, cases.parameter
        return operation_sweep(*named, kernels=kernels, cache=cases.cache)
    layers = () if cases.config is None else layers_of_option("sweep", cases.config, cases.layers)
    shapes = parse_sweep(
        kernels=None if kernels is None else ",".join(kernels),
        m=_sizes("--m", cases.m),
        n=_sizes("--n", cases.n),
        k=_sizes("--k", cases.k),
        model=cases.model,
        layers=cases.layers,
        stage=cases.stage,
        cache=cases.cache,
        shapes=tuple(Shape(layer.n, layer.k, layer.name) for layer in layers),
    )
    for layer in layers:
        size = f"{layer.n}x{layer.k}"
        say(options.console, f"{layer.name}: {size}, {layer.count} in the model")
    return shapes


def _suite_of_trace(
    path: str, cases: SweptCases, kernels: Sequence[str] | None, options: RunOptions
) -> tuple[Suite, RunOptions]:
    """Build a suite of a trace's launches, and the options with its counts. Raises UsageError."""
    from flexq_bench.cli.measuring import read_trace

    trace = read_trace(path)
    for line in summary_lines(trace):
        say(options.console, line)
    launches = trace.launches[: cases.most]
    suite = launch_suite(launches, kernels=kernels, stage=cases.stage, cache=cases.cache)
    return suite, replace(options, trace=trace)


def _queue(sweep: Sweep, options: RunOptions) -> None:
    """Queue a sweep as a request. Raises UsageError, LimitError."""
    from flexq_bench.fleet.requests import submit, sweep_request

    gpus = options.pool.gpus
    if len(gpus) > 1:
        raise UsageError(f"--queue takes one kind of GPU, got {', '.join(gpus)}: queue one each")
    with open_database(options.db) as database, database.session() as session:
        request = sweep_request(
            session,
            sweep,
            requester=user_name(),
            gpu="".join(gpus),
            backend=options.pool.backend or "cuda",
        )
        submit(session, request)
        status = command("status", *database_arguments(database))
    took = "" if request.expected_s is None else f", about {request.expected_s:.0f} s"
    say(options.console, f"queued request {request.uuid[:8]}: {request.cases} cases{took}")
    say(options.console, f"see how far it is: {status}")
