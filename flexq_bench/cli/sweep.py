"""`flexq-bench sweep`: measure kernels on given shapes, or on those of a model or a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
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
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.errors import UsageError
from flexq_bench.runs.command_lines import command, database_arguments, user_name
from flexq_bench.runs.text_files import read_text
from flexq_bench.sweeps.launches import launch_suite, summary_lines
from flexq_bench.sweeps.text import operation_sweep, parse_sweep, split_names, split_sizes
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import OperationWorkload
from flexq_bench.workloads.probes import is_probe
from flexq_bench.workloads.ranges import parse_lines
from flexq_bench.workloads.suite import Group, OperationGroup, Shape, Suite

if TYPE_CHECKING:
    from flexq_bench.cli.measuring import RunOptions
    from flexq_bench.sweeps.sweep import Sweep

_MAX_SIZE_FILE_BYTES = 1 << 20  # ten times that of the largest number of sizes, 10,000


@stores_options()
@takes_option_groups
def sweep(
    *,
    kernels: KernelsOption = None,
    sources: KernelSourceOptions,
    m: Annotated[
        str | None,
        typer.Option(
            metavar="RANGES", help="Tokens: 1,2,4:64:x2, or @FILE with such. Default: 1,2,4,8,16."
        ),
    ] = None,
    n: Annotated[str | None, typer.Option(metavar="RANGES", help="Output features.")] = None,
    k: Annotated[str | None, typer.Option(metavar="RANGES", help="Input features.")] = None,
    operation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="An operation other than linear, with --parameter."),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES", help="With --operation: heads=32, context=1024:8192:x2."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A model's layers, not --n and --k."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="The layers of a Hugging Face config.json, or of a folder with one.",
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="With --model: fused, separate, or names. With --config: names."
        ),
    ] = "fused",
    like: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="The cases of this run (its uuid's beginning); --kernels and --m replace its own.",
        ),
    ] = None,
    from_trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What a program launched: a trace of torch.profiler, or of FlashInfer-Bench.",
        ),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --from-trace: only the N workloads with most time."
        ),
    ] = None,
    stage: Annotated[
        str, typer.Option(metavar="STAGES", help="gemm, linear or both: gemm,linear.")
    ] = "gemm",
    cache: Annotated[
        str, typer.Option(metavar="MODES", help="cold, hot or both: cold,hot.")
    ] = "cold",
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
    if parameter and operation is None:
        raise UsageError("--parameter goes with --operation: flexq-bench list operations")
    if most is not None and from_trace is None:
        raise UsageError("--most goes with --from-trace")
    if from_trace is not None:
        if queue or any(value is not None for value in (m, n, k, model, config, like, operation)):
            raise UsageError(
                "--from-trace has its own shapes: drop --m, --n, --k, --model, --config, --like, "
                "--operation and --queue"
            )
        suite, options = _suite_of_trace(from_trace, most, patterns, stage, cache, options)
    elif like is not None:
        if n is not None or k is not None or model is not None or config is not None or queue:
            raise UsageError(
                "--like has the run's own shapes: drop --n, --k, --model, --config and --queue"
            )
        suite = _suite_like(like, patterns, _sizes("--m", m), db)
    elif operation is not None:
        if any(value is not None for value in (m, n, k, model, config)):
            raise UsageError(
                "--operation has --parameter: drop --m, --n, --k, --model and --config"
            )
        shapes = operation_sweep(operation, parameter, kernels=patterns, cache=cache)
        suite = shapes.suite()
    else:
        config_layers = () if config is None else layers_of_option("sweep", config, layers)
        shapes = parse_sweep(
            kernels=None if patterns is None else ",".join(patterns),
            m=_sizes("--m", m),
            n=_sizes("--n", n),
            k=_sizes("--k", k),
            model=model,
            layers=layers,
            stage=stage,
            cache=cache,
            shapes=tuple(Shape(layer.n, layer.k, layer.name) for layer in config_layers),
        )
        for layer in config_layers:
            size = f"{layer.n}x{layer.k}"
            say(options.console, f"{layer.name}: {size}, {layer.count} in the model")
        suite = shapes.suite()
    if queue:
        if regimes not in (None, ("boost",)):
            raise UsageError("--queue measures under boost only: leave --regime or --queue out")
        _queue(shapes, options)
        return
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


def _suite_of_trace(
    path: str,
    most: int | None,
    kernels: Sequence[str] | None,
    stage: str,
    cache: str,
    options: RunOptions,
) -> tuple[Suite, RunOptions]:
    """Build a suite of a trace's launches, and the options with its counts. Raises UsageError."""
    from flexq_bench.cli.measuring import read_trace

    trace = read_trace(path)
    for line in summary_lines(trace):
        say(options.console, line)
    suite = launch_suite(trace.launches[:most], kernels=kernels, stage=stage, cache=cache)
    return suite, replace(options, trace=trace)


def _suite_like(
    prefix: str, kernels: Sequence[str] | None, m: Sequence[int] | None, db: str | None
) -> Suite:
    """Build a suite of a stored run's cases, without its probes, which planning adds.

    kernels, m: replace the run's own; None: its own. Raises NotFoundError, UsageError.
    """

    with open_database(db, create=False) as database, database.session() as session:
        run = queries.run_info(session, queries.run_by_uuid_prefix(session, prefix).uuid)
        names = {
            (row.n, row.k): Shape(row.n, row.k, row.layer, row.model)
            for row in queries.run_results(session, run.uuid)
            if row.n is not None and row.k is not None
        }
    cases = [case for case in map(Case.from_key, run.plan) if not is_probe(case.kernel)]
    if not cases:
        raise UsageError(f"run {run.uuid[:8]} planned no kernel: there is nothing to be like")
    others = [case for case in cases if isinstance(case.workload, OperationWorkload)]
    cases = [case for case in cases if case not in set(others)]
    sizes: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for case in cases:
        sizes[_all_but_m(case)].add(case.gemm.m)
    groups = dict.fromkeys(
        Group(
            tuple(kernels or (case.label,)),
            tuple(m or sorted(sizes[_all_but_m(case)])),
            (names.get((case.gemm.n, case.gemm.k), Shape(case.gemm.n, case.gemm.k, layer="")),),
            (case.stage,),
            (case.cache,),
            (case.regime,),
        )
        for case in cases
    )
    other_groups = dict.fromkeys(
        OperationGroup(
            tuple(kernels or (case.label,)), (case.workload,), (case.cache,), (case.regime,)
        )
        for case in others
        if m is None and isinstance(case.workload, OperationWorkload)
    )
    description = f"like run {run.uuid[:8]} of {run.suite}"
    return Suite("sweep", description, "", (*tuple(groups), *tuple(other_groups)))


def _all_but_m(case: Case) -> tuple[object, ...]:
    return (case.label, case.gemm.n, case.gemm.k, case.stage, case.cache, case.regime)


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
