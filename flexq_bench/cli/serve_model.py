"""`flexq-bench serve-model`: a model on the decode engine, behind OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexq_bench.cli.listening import AddressOption, AllowHostOption, server_url
from flexq_bench.cli.model_options import CalibrationOptions, SchemesFromOption, use_own_schemes
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import (
    MAX_COUNT,
    DeviceOptions,
    JsonFlag,
    SeedOption,
    TuningOptions,
)
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.errors import UsageError
from flexq_bench.packages import require_extra

_LONGEST = 2048  # tokens, unless the context is shorter or --longest is given
_MAX_SLOTS = 1024


@takes_option_groups
def serve_model(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A quantized checkpoint, a Hugging Face folder or a .gguf file.",
        ),
    ],
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Quantize a model that is none first. Default: a checkpoint's own; else fp16.",
        ),
    ] = None,
    kv_bits: Annotated[
        int | None,
        typer.Option(help="Bits of the KV cache: 16, 8 or 4. Default: the scheme's."),
    ] = None,
    schemes_from: SchemesFromOption = None,
    calibrating: CalibrationOptions,
    name: Annotated[
        str | None,
        typer.Option(help="Name by which clients ask for the model. Default: the folder's."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    address: AddressOption = "127.0.0.1",
    allow_host: AllowHostOption = None,
    batch_limit: Annotated[
        int, typer.Option(min=1, max=_MAX_SLOTS, help="Maximum number of concurrent sequences.")
    ] = 32,
    longest: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=MAX_COUNT,
            help=f"Maximum number of tokens of a sequence. Default: {_LONGEST}, or the context.",
        ),
    ] = None,
    step_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            help="Maximum number of prompt tokens processed between two steps.",
        ),
    ] = 512,
    max_waiting: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_COUNT, help="Sequences that wait for others; with more: status 429."
        ),
    ] = 256,
    invariant: Annotated[
        bool,
        typer.Option("--invariant", help="Answers do not depend on the batch, as in decode."),
    ] = False,
    place: DeviceOptions,
    seed: SeedOption = 0,
    tuning: TuningOptions,
    as_json: JsonFlag = False,
) -> None:
    """Serve a model by the interface of OpenAI's API until Ctrl-C: completions and chat.

    The engine, its kernels and its batching are those of decode --serve.

    --json prints the address as JSON before it starts.
    """
    require_extra("serve", "serve-model")
    require_extra("models", "serve-model")

    from flexq_bench.cli import decoding
    from flexq_bench.decode.case import FULL_PRECISION, Setup
    from flexq_bench.decode.records import name_of_model
    from flexq_bench.schemes.model_files import is_there
    from flexq_bench.serving.loading import load_vocabulary
    from flexq_bench.serving.running import EngineOptions, prepared_engine, serve_until_stopped

    use_own_schemes(schemes_from)
    url = server_url(address, port)
    path = Path(model)
    if not is_there(path):
        raise UsageError(f"no model {model}: give a checkpoint, a folder or a .gguf file")
    if scheme is None and not decoding.is_a_checkpoint(model):
        scheme = FULL_PRECISION
    text = calibrating.text()
    (cached, *others) = decoding.requested_schemes(model, scheme, kv_bits, calibrated=False)
    if others:
        raise UsageError("a server has one scheme: give one --scheme")
    vocabulary = load_vocabulary(path)
    device = place.device_name()
    checkpoints = decoding.quantized(model, [cached], device, seed, text, capacity=longest or 1)
    setup = Setup(model, (cached,), device, seed=seed, checkpoints=checkpoints, invariant=invariant)
    options = EngineOptions(batch_limit, longest, _LONGEST, step_tokens, max_waiting)
    served_name = name or name_of_model(model)
    with prepared_engine(setup, tuning.tuning, options) as prepared:
        if as_json:
            kernels = dict(prepared.kernels)
            print_json({"url": f"{url}/v1", "model": served_name, "kernels": kernels})
        else:
            say(console(), f"{served_name} ({cached.scheme}) at {url}/v1 (Ctrl-C ends it)")
        serve_until_stopped(prepared, served_name, vocabulary, address, port, allow_host or ())
