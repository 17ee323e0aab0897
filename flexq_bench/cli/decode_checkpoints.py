"""Checkpoints for `decode`: one per scheme, quantized once and cached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from flexq_bench.checkpoints.folders import is_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.cli.output import console, say
from flexq_bench.decode.architecture import check_capacity, of_catalog, of_config
from flexq_bench.decode.case import FULL_PRECISION, CachedScheme, check_cache, read_scheme
from flexq_bench.decode.checkpoint_cache import CalibrationText, CheckpointCache, key_of
from flexq_bench.decode.rounded_weights import runnable_formats
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.schemes.model_files import ModelFiles, is_there, model_at
from flexq_bench.schemes.registry import resolve, without_cache
from flexq_bench.schemes.scheme import Scheme
from flexq_bench.sweeps.text import split_names
from flexq_bench.workloads.models import load_catalog

_DEFAULT = "fp16,smoothquant-w8a8,flexq-w6ax"
_UNCALIBRATED_DEFAULT = "fp16,flexq-w6ax"


def requested_schemes(
    model: str, named: str | None, kv_bits: int | None, *, calibrated: bool
) -> tuple[CachedScheme, ...]:
    """Return the schemes to decode: those given, or that of the checkpoint, or the default ones.

    Raises UsageError for unknown schemes, and for schemes given together with a checkpoint.
    """
    if is_a_checkpoint(model):
        checkpoint = open_checkpoint(Path(model))
        if kv_bits is not None:
            check_cache(kv_bits)
        if named is not None:
            raise UsageError(
                f"{model} is a checkpoint of {checkpoint.scheme.name}: leave --scheme out (its "
                "cache: --kv-bits)"
            )
        own = CachedScheme(
            without_cache(checkpoint.scheme.name),
            checkpoint.kv_bits if kv_bits is None else kv_bits,
        )
        return (own,)
    random = model in load_catalog()
    usual = _DEFAULT if random or calibrated else _UNCALIBRATED_DEFAULT
    names = split_names(usual if named is None else named) or ()
    if not names:
        raise UsageError("which schemes? Give --scheme (see list schemes)")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--scheme names {twice[0]} twice: each is decoded once")
    return tuple(read_scheme(name, kv_bits) for name in names)


def is_a_checkpoint(model: str) -> bool:
    """Return True if the model is the folder of a quantized checkpoint."""
    return model not in load_catalog() and is_there(Path(model)) and is_checkpoint(Path(model))


def quantized(
    model: str,
    schemes: Sequence[CachedScheme],
    device: str,
    seed: int,
    calibration: CalibrationText | None,
    *,
    capacity: int,
) -> dict[str, str]:
    """Return the checkpoint folder of each scheme; none for fp16, random weights and checkpoints.

    Schemes that are not cached are quantized by `flexq-bench quantize` in a separate process, which
    releases all its memory. capacity: tokens of the shortest sequence. Raises UsageError, before
    quantizing, for a scheme without a kernel or without required calibration data, and if every
    sequence is longer than the model's context.
    """
    if is_a_checkpoint(model):
        return {}
    path, catalog = Path(model), load_catalog()
    chosen = {of.scheme: resolve(of.scheme) for of in schemes if of.scheme != FULL_PRECISION}
    if model in catalog:
        architecture = of_catalog(catalog[model])
        check_capacity(capacity, architecture.dimensions.context, model)
        for scheme in chosen.values():
            runnable_formats(scheme, architecture)
        return {}
    if not is_there(path):
        return {}
    files = model_at(path)
    if files.gguf is None:  # a GGUF file is checked when it is loaded
        architecture = of_config(files.config(), files.name)
        check_capacity(capacity, architecture.dimensions.context, model)
        for scheme in chosen.values():
            runnable_formats(scheme, architecture)
    for scheme in chosen.values():
        _check_calibration(scheme, calibration)
    cache = CheckpointCache()
    return {
        name: str(_checkpoint(cache, files, model, scheme, device, seed, calibration))
        for name, scheme in chosen.items()
    }


def _check_calibration(scheme: Scheme, calibration: CalibrationText | None) -> None:
    if scheme.needs_calibration and calibration is None:
        raise UsageError(
            f"{scheme.name}: calibration data are needed: give --calibration FILE, or the name of "
            "list models, whose random weights are rounded to nearest"
        )


def _checkpoint(
    cache: CheckpointCache,
    files: ModelFiles,
    model: str,
    scheme: Scheme,
    device: str,
    seed: int,
    calibration: CalibrationText | None,
) -> Path:
    key = key_of(files, scheme, seed, calibration, device.partition(":")[0])

    def quantize_into(folder: Path) -> None:
        arguments = ["--scheme", scheme.name, "--out", str(folder), "--overwrite"]
        arguments += ["--device", device, "--seed", str(seed)]
        if calibration is not None and scheme.needs_calibration:
            arguments += ["--calibration", calibration.text]
            arguments += ["--calibration-segments", str(calibration.segments)]
            if calibration.length is not None:
                arguments += ["--calibration-length", str(calibration.length)]
        seconds = _quantize(model, arguments)
        say(console(stderr=True), f"{scheme.name}: quantized in {seconds:.1f} s")

    folder, was_there = cache.get(key, quantize_into)
    origin = "found in" if was_there else "kept in"
    say(
        console(stderr=True),
        f"{scheme.name}: checkpoint {open_checkpoint(folder).content_hash[:12]} {origin} {folder} "
        f"(the folder above holds {cache.limit} at most)",
    )
    return folder


def _quantize(model: str, options: Sequence[str]) -> float:
    """Run `flexq-bench quantize`; returns its seconds. Raises its error message in one line."""
    shown = sys.stderr.isatty()
    command = [sys.executable, "-m", "flexq_bench", "quantize", model, *options, "--json"]
    with ended_by_terminate():
        ran = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=None if shown else subprocess.PIPE,
            text=True,
            check=False,
        )
    if ran.returncode == 0:
        return float(json.loads(ran.stdout)["seconds"])
    if shown:  # its error is on the terminal already
        raise typer.Exit(ran.returncode)
    lines = (ran.stderr or "").strip().splitlines() or [f"quantize ended with {ran.returncode}"]
    kind = UsageError if ran.returncode == ExitCode.USAGE else InfrastructureError
    raise kind(lines[-1].removeprefix("flexq-bench: "))
