"""`flexq-bench quantize`: quantize a model into a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexq_bench.cli.model_options import (
    CalibrationOptions,
    DtypeOption,
    SchemesFromOption,
    use_own_schemes,
)
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import DeviceOption, JsonFlag, SeedOption, output_option
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.cli.progress import progress
from flexq_bench.errors import UsageError
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.packages import require_extra
from flexq_bench.workloads.models import get_model, load_catalog, spelled

if TYPE_CHECKING:
    from flexq_bench.checkpoints.model_source import ModelSource
    from flexq_bench.checkpoints.quantizing import WrittenCheckpoint
    from flexq_bench.schemes import Calibration, Scheme
    from flexq_bench.schemes import Progress as OnBlock

log = logging.getLogger(__name__)
_MIB = 1 << 20


@takes_option_groups
def quantize(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with config.json and safetensors, a .gguf file, owner/name on the "
            "Hugging Face hub, or a model of the catalog (list models), with random weights.",
        ),
    ],
    scheme: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name of a scheme (list schemes)."),
    ],
    out: Annotated[
        str,
        output_option(metavar="FOLDER", help="New folder for the checkpoint."),
    ],
    overwrite: Annotated[
        bool,
        output_option("--overwrite", help="Replace an existing checkpoint."),
    ] = False,
    kv_bits: Annotated[
        int | None,
        typer.Option(help="Bits of cached keys and values: 16, 8 or 4. Default: the scheme's."),
    ] = None,
    schemes_from: SchemesFromOption = None,
    calibrating: CalibrationOptions,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonFlag = False,
) -> None:
    """Quantize a model and write it as a checkpoint, which other verbs evaluate and time.

    Only one block of the model is in memory at a time. Exit code 0: written; 2: an argument doesn't
    exist or doesn't fit; then nothing is written.
    """
    require_extra("models", "quantize")

    from flexq_bench.accuracy.loading import DTYPES, chosen_dtype, load_tokenizer
    from flexq_bench.accuracy.setup import best_device
    from flexq_bench.checkpoints.model_source import open_source
    from flexq_bench.checkpoints.quantizing import quantize_checkpoint
    from flexq_bench.decode.architecture import of_catalog
    from flexq_bench.decode.synthetic_source import SyntheticSource
    from flexq_bench.decode.weights import SyntheticWeights
    from flexq_bench.measure.device import find_device
    from flexq_bench.schemes.model_files import find_model
    from flexq_bench.schemes.registry import resolve

    use_own_schemes(schemes_from)
    algorithm = resolve(scheme)
    if calibrating.calibration is not None and not algorithm.needs_calibration:
        raise UsageError(f"{algorithm.name} learns from no texts: leave --calibration out")
    chosen = find_device(best_device() if device is None else device)
    kind = chosen_dtype(dtype, chosen)
    data = None
    source: ModelSource
    if not Path(model).exists():
        model = spelled(model)
    if model in load_catalog():
        source = SyntheticSource(SyntheticWeights(of_catalog(get_model(model)), seed))
        if algorithm.needs_calibration:
            raise UsageError(
                f"{algorithm.name} learns from texts, and {model} is a model of the catalog with "
                "random weights: pick a scheme that rounds to nearest, or give a model's folder"
            )
    else:
        files = find_model(model)
        source = open_source(files)
        source.config()  # a tokenizer can't be loaded beside an invalid one
        tokenizer = None
        if algorithm.needs_calibration or (files.gguf is None and files.tokenizer_files()):
            tokenizer = load_tokenizer(files)  # a checkpoint with a damaged one can't be evaluated
        if algorithm.needs_calibration:
            with progress("reading the calibration"):
                data = _calibrated(source, tokenizer, algorithm, calibrating, seed)
    with ended_by_terminate(), _progress() as on_block:
        written = quantize_checkpoint(
            source,
            algorithm,
            Path(out),
            calibration=data,
            kv_bits=kv_bits,
            seed=seed,
            device=chosen,
            dtype=DTYPES[kind],
            overwrite=overwrite,
            progress=on_block,
        )
    if as_json:
        facts = {"folder": str(written.folder), "bits_per_weight": written.bits_per_weight}
        print_json(asdict(written) | facts)
    else:
        _show(written, ", of random weights" if source.is_synthetic else "")


def _show(written: WrittenCheckpoint, weights: str) -> None:
    to = console()
    say(to, f"checkpoint: {written.folder}{weights}")
    say(to, f"content hash: {written.content_hash}")
    say(
        to,
        f"bits a weight: {written.bits_per_weight:.3f} of {written.weights:,} quantized weights, "
        "scales included",
    )
    say(
        to,
        f"size: {written.stored_bytes / _MIB:,.1f} MiB, "
        f"{written.quantized_bytes / _MIB:,.1f} of them quantized layers",
    )
    say(to, f"time: {written.seconds:.1f} s")
    say(to, f"peak memory: {written.peak_bytes / _MIB:,.1f} MiB, {written.peak_of}")


def _calibrated(
    source: ModelSource,
    tokenizer: Any,
    algorithm: Scheme,
    calibrating: CalibrationOptions,
    seed: int,
) -> Calibration:
    """Build the calibration segments, as `accuracy` does."""
    from flexq_bench.accuracy.loading import segment_length
    from flexq_bench.accuracy.texts import tokenize
    from flexq_bench.schemes import calibration_segments

    plan = calibrating.plan()
    if plan is None:
        raise UsageError(
            f"{algorithm.name}: calibration data are needed: give --calibration FILE, a text that "
            "is not evaluated on"
        )
    return calibration_segments(
        tokenize(plan.text, tokenizer),
        segments=plan.segments,
        length=segment_length(source.name, source.config(), plan.length),
        seed=seed,
    )


@contextmanager
def _progress() -> Iterator[OnBlock]:
    """Show progress, and log one line per block."""
    with progress("reading") as bar:

        def on_block(block: int, total: int, what: str) -> None:
            log.info("%s of %d", what, total)
            bar.update(block, total, what)

        yield on_block
