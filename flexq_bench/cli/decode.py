"""`flexq-bench decode`: a whole model under one or more schemes, decoded or served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flexq_bench.cli.model_options import (
    CalibrationOption,
    LengthOption,
    SchemesFromOption,
    SegmentsOption,
    use_own_schemes,
)
from flexq_bench.cli.options import (
    LARGEST_COUNT,
    MOST_PROCESSES,
    BackendChoice,
    BackendOption,
    DbOption,
    DeviceOption,
    JsonFileOption,
    NoTuneOption,
    RetuneOption,
    SeedOption,
    finite,
    given_options,
    tuning_of,
)
from flexq_bench.errors import UsageError
from flexq_bench.sweeps.text import split_sizes

_MOST_REQUESTS = 100_000
_MOST_TOKENS = 2**20  # of one sequence
_OF_SERVING = ("batch_limit", "memory_gib", "requests", "longest", "lengths", "step_tokens")
_OF_BATCHES = ("batch", "prompt", "new")


def decode(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A name of list models (random weights of its shapes), a Hugging Face folder, a "
            "quantized checkpoint or a .gguf file."
        ),
    ],
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            metavar="NAMES",
            help="Comma-separated; the first is the base. NAME+kv8 has a KV cache of 8 bits. "
            "Default: a checkpoint's own; else fp16,smoothquant-w8a8,flexq-w6ax, without the "
            "calibrated one where there are weights and no --calibration.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        str, typer.Option("--batch", metavar="RANGES", help="Batch sizes: 1,2,4,8.")
    ] = "1",
    prompt: Annotated[
        int, typer.Option("--prompt", min=1, max=_MOST_TOKENS, help="Tokens of each prompt.")
    ] = 15,
    new: Annotated[
        str, typer.Option("--new", metavar="RANGES", help="Numbers of tokens to decode: 128,1024.")
    ] = "128",
    kv_bits: Annotated[
        int | None,
        typer.Option(
            "--kv-bits",
            help="Bits of every scheme's KV cache: 16, 8 or 4. Default: the scheme's.",
            show_default=False,
        ),
    ] = None,
    schemes_from: SchemesFromOption = None,
    calibration: CalibrationOption = None,
    calibration_segments: SegmentsOption = 128,
    calibration_length: LengthOption = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            max=MOST_PROCESSES,
            help="Number of processes that repeat all measurements. Default: 5 on a GPU (3 for "
            "more than 512 new tokens), 1 on a CPU.",
            show_default=False,
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve requests by continuous batching instead.")
    ] = False,
    batch_limit: Annotated[
        str,
        typer.Option(
            "--batch-limit",
            metavar="RANGES",
            help="With --serve: maximum number of concurrent requests.",
        ),
    ] = "8,16,32,64",
    memory_gib: Annotated[
        float | None,
        typer.Option(
            "--memory-gib",
            min=0.001,
            max=1e6,
            callback=finite,
            help="With --serve: limit of memory, weights included, for concurrent requests.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            "--requests", min=1, max=_MOST_REQUESTS, help="With --serve: number of requests."
        ),
    ] = 256,
    longest: Annotated[
        int,
        typer.Option(
            "--longest",
            min=2,
            max=_MOST_TOKENS,
            help="With --serve: maximum number of tokens of a sequence.",
        ),
    ] = 1024,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="FILE",
            help="With --serve: lines of prompt,new. Default: lognormal, like chats.",
            show_default=False,
        ),
    ] = None,
    step_tokens: Annotated[
        int,
        typer.Option(
            "--step-tokens",
            min=1,
            max=LARGEST_COUNT,
            help="With --serve: maximum number of prompt tokens processed between two steps.",
        ),
    ] = 512,
    backend: BackendOption = BackendChoice.AUTO,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Resume this run (a prefix of its uuid) with its own options.",
            show_default=False,
        ),
    ] = None,
    no_tune: NoTuneOption = False,
    retune: RetuneOption = False,
    db: DbOption = None,
    as_json: JsonFileOption = None,
) -> None:
    """Decode a model end to end under each scheme; store and compare times, memory and energy.

    A model is quantized first, into a cached checkpoint; a checkpoint is decoded as it is. Results
    are stored after each process. Exit code 0: measured; 2: it can't be measured as requested
    (unknown names, too long, too large); 5: this machine or the database failed; 130: interrupted
    (continue with --resume).
    """
    from flexq_bench.accuracy.texts import read_text
    from flexq_bench.cli import decode_runs as decoding
    from flexq_bench.cli.decode_checkpoints import quantized, requested_schemes
    from flexq_bench.cli.measuring import backend_of
    from flexq_bench.db.engine import open_database
    from flexq_bench.db.queries import run_by_uuid_prefix
    from flexq_bench.decode.case import Setup
    from flexq_bench.decode.checkpoint_cache import CalibrationText
    from flexq_bench.decode.measurement import cases_of
    from flexq_bench.decode.runs import Serving, serving_cases
    from flexq_bench.fleet import device_name
    from flexq_bench.measure.device import find_device
    from flexq_bench.runs.result_files import ResultFiles
    from flexq_bench.schemes.model_files import is_there
    from flexq_bench.workloads.models import get_model, load_catalog

    use_own_schemes(schemes_from)
    if serve and (excluded := given_options(context, _OF_BATCHES)):
        raise UsageError(f"{', '.join(excluded)}: not with --serve, leave one of them out")
    if not serve and (excluded := given_options(context, _OF_SERVING)):
        raise UsageError(f"{', '.join(excluded)}: only with --serve, add it or leave them out")
    if model not in load_catalog() and not is_there(Path(model)):
        get_model(model)  # raises with the known names
    with open_database(db, create=resume is None) as database, database.session() as session:
        if resume is not None:
            run_by_uuid_prefix(session, resume)
    if calibration is not None:
        read_text(calibration)  # reports a wrong path even if no scheme needs the text
    text = None
    if calibration is not None:
        text = CalibrationText(calibration, calibration_segments, calibration_length)
    schemes = requested_schemes(model, scheme, kv_bits, calibrated=text is not None)
    where = device_name(backend_of(backend), device)
    files = ResultFiles(as_json)
    # Input errors are reported before a model is quantized, which takes minutes.
    find_device(where)
    setup = Setup(
        model,
        schemes,
        where,
        processes or (5 if where.startswith("cuda") else 1),
        processes or (3 if where.startswith("cuda") else 1),
        seed,
        tuning_of(no_tune=no_tune, retune=retune),
    )
    if serve:
        limits = split_sizes(batch_limit) or ()
        serving = Serving(limits, memory_gib, requests, longest, lengths, step_tokens)
        servings = serving_cases(setup, serving)
        capacity = servings[0].capacity
    else:
        decodes = cases_of(setup, split_sizes(batch) or (), prompt, split_sizes(new) or ())
        capacity = min(case.capacity for case in decodes)
    checkpoints = quantized(model, schemes, where, seed, text, capacity=capacity)
    setup = replace(setup, checkpoints=checkpoints)
    if serve:
        raise typer.Exit(decoding.serve(setup, servings, resume, db, files))
    raise typer.Exit(decoding.decode(setup, decodes, resume, db, files))
