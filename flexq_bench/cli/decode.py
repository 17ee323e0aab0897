"""`flexq-bench decode`: a whole model under one or more schemes, decoded or served."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.model_options import CalibrationOptions, SchemesFromOption, use_own_schemes
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import (
    MAX_COUNT,
    MAX_PROCESSES,
    DbOption,
    DeviceOptions,
    JsonFileOption,
    SeedOption,
    TuningOptions,
    finite,
    given_options,
)
from flexq_bench.db.engine import open_database
from flexq_bench.db.queries import run_by_uuid_prefix
from flexq_bench.errors import UsageError
from flexq_bench.packages import require_extra
from flexq_bench.runs.result_files import ResultFiles
from flexq_bench.sweeps.text import split_sizes
from flexq_bench.workloads.models import get_model

if TYPE_CHECKING:
    from flexq_bench.decode.runs import Serving

MAX_GPUS = 16
_MAX_REQUESTS = 100_000
_MAX_TOKENS = 2**20  # of one sequence


@dataclass(frozen=True)
class BatchOptions:
    """Batches that are decoded without --serve."""

    batch: Annotated[str, typer.Option(metavar="RANGES", help="Batch sizes: 1,2,4,8.")] = "1"
    prompt: Annotated[
        str, typer.Option(metavar="RANGES", help="Numbers of tokens of each prompt: 15,512.")
    ] = "15"
    new: Annotated[
        str, typer.Option(metavar="RANGES", help="Numbers of tokens to decode: 128,1024.")
    ] = "128"

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Parse batch sizes, numbers of tokens of prompts, and of tokens to decode."""
        sizes = (split_sizes(text) for text in (self.batch, self.prompt, self.new))
        return tuple(values or () for values in sizes)


@dataclass(frozen=True)
class ServingOptions:
    """Requests that are served with --serve."""

    serve: Annotated[
        bool, typer.Option("--serve", help="Serve requests by continuous batching instead.")
    ] = False
    batch_limit: Annotated[
        str,
        typer.Option(metavar="RANGES", help="With --serve: maximum number of concurrent requests."),
    ] = "8,16,32,64"
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e6,
            callback=finite,
            help="With --serve: limit of memory, weights included, for concurrent requests.",
        ),
    ] = None
    requests: Annotated[
        str,
        typer.Option(help="With --serve: number of requests; 4x: four times each batch limit."),
    ] = "256"
    longest: Annotated[
        int,
        typer.Option(
            min=2, max=_MAX_TOKENS, help="With --serve: maximum number of tokens of a sequence."
        ),
    ] = 1024
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --serve: lines of prompt,new. Default: lognormal, like chats.",
        ),
    ] = None
    step_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            help="With --serve: maximum number of prompt tokens processed between two steps.",
        ),
    ] = 512

    def as_serving(self) -> Serving:
        from flexq_bench.decode.runs import Serving

        limits = split_sizes(self.batch_limit) or ()
        number, times, rest = self.requests.partition("x")
        count = int(number) if number.isdecimal() and not rest else 0
        if not 1 <= count * (max(limits, default=1) if times else 1) <= _MAX_REQUESTS:
            raise UsageError(
                f"--requests is 1 to {_MAX_REQUESTS:,}, or 4x for four times each batch limit, got "
                f"{self.requests!r}"
            )
        return Serving(
            *(limits, self.memory_gib, count, self.longest, self.lengths, self.step_tokens),
            times_limit=bool(times),
        )


@takes_option_groups
def decode(
    *,
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
            metavar="NAMES",
            help="Comma-separated; the first is the base. NAME+kv8 has a KV cache of 8 bits. "
            "Default: a checkpoint's own; else fp16,smoothquant-w8a8,flexq-w6ax, without the "
            "calibrated one where there are weights and no --calibration.",
        ),
    ] = None,
    batches: BatchOptions,
    kv_bits: Annotated[
        int | None,
        typer.Option(help="Bits of every scheme's KV cache: 16, 8 or 4. Default: the scheme's."),
    ] = None,
    schemes_from: SchemesFromOption = None,
    calibrating: CalibrationOptions,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_PROCESSES,
            help="Number of processes that repeat all measurements. Default: 5 on a GPU (3 for "
            "more than 512 new tokens), 1 on a CPU.",
        ),
    ] = None,
    serving: ServingOptions,
    gpus: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_GPUS, help="Number of GPUs, from --device on, that share every layer."
        ),
    ] = 1,
    invariant: Annotated[
        bool,
        typer.Option(
            "--invariant",
            help="Logits do not depend on the batch: fixed orders of addition, for schemes whose "
            "layers add integers (dual-w6a8, smoothquant-w8a8). Records have their SHA-256.",
        ),
    ] = False,
    place: DeviceOptions,
    seed: SeedOption = 0,
    brief: Annotated[
        bool,
        typer.Option(
            "--brief",
            help="One process, without energy and the parts of a step; a shorter decode is the "
            "first tokens of the longest.",
        ),
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Resume this run (a prefix of its uuid) with its own options."
        ),
    ] = None,
    tuning: TuningOptions,
    db: DbOption = None,
    as_json: JsonFileOption = None,
) -> None:
    """Decode a model end to end under each scheme; store and compare times, memory and energy.

    A model is quantized first, into a cached checkpoint; a checkpoint is decoded as it is. Results
    are stored after each process. Exit code 0: measured; 2: it can't be measured as requested
    (unknown names, too long, too large); 5: this machine or the database failed; 130: interrupted
    (continue with --resume).
    """
    require_extra("models", "decode")

    from flexq_bench.cli import decoding
    from flexq_bench.decode.case import Setup
    from flexq_bench.decode.measurement import cases_of
    from flexq_bench.decode.runs import serving_cases
    from flexq_bench.schemes.model_files import is_there

    # Input errors are reported before a model is quantized, which takes minutes.
    use_own_schemes(schemes_from)
    _check_together(context, serve=serving.serve, gpus=gpus, invariant=invariant)
    if not is_there(Path(model)):
        model = get_model(model).name  # raises with the known names
    with open_database(db, create=resume is None) as database, database.session() as session:
        if resume is not None:
            run_by_uuid_prefix(session, resume)
    text = calibrating.text()  # reports a wrong path even if no scheme needs it
    schemes = decoding.requested_schemes(model, scheme, kv_bits, calibrated=text is not None)
    files = ResultFiles(as_json)
    device = place.device_name()
    several = device.startswith("cuda") and not brief
    setup = Setup(
        model,
        schemes,
        device,
        processes or (5 if several else 1),
        processes or (3 if several else 1),
        seed,
        tuning.tuning,
        gpus=gpus,
        invariant=invariant,
        brief=brief,
    )

    def setup_of(capacity: int) -> Setup:
        checkpoints = decoding.quantized(model, schemes, device, seed, text, capacity=capacity)
        return replace(setup, checkpoints=checkpoints)

    if serving.serve:
        servings = serving_cases(setup, serving.as_serving())
        setup = setup_of(servings[0].capacity)
        raise typer.Exit(decoding.serve(setup, servings, resume, db, files))
    decodes = cases_of(setup, *batches.sizes())
    setup = setup_of(min(case.capacity for case in decodes))
    raise typer.Exit(decoding.decode(setup, decodes, resume, db, files))


def _check_together(context: typer.Context, *, serve: bool, gpus: int, invariant: bool) -> None:
    """Raise UsageError for options that exclude each other."""
    if serve and (excluded := given_options(context, _names(BatchOptions))):
        raise UsageError(f"{', '.join(excluded)}: not with --serve, leave one of them out")
    if not serve and (excluded := given_options(context, _names(ServingOptions))):
        raise UsageError(f"{', '.join(excluded)}: only with --serve, add it or leave them out")
    if serve and gpus > 1:
        raise UsageError("--serve runs on one GPU: leave --gpus out")
    if invariant and (serve or gpus > 1):
        raise UsageError("--invariant is for batches on one GPU: leave --serve and --gpus out")


def _names(group: type[BatchOptions | ServingOptions]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(group))
