"""The work of `decode`: quantize what is not cached, measure, print tables."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from flexq_bench.checkpoints.folders import is_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.cli.output import console, print_unbroken, say, say_interrupted
from flexq_bench.cli.progress import progress
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.records import DecodeRecord, RunInfo, ServingRecord
from flexq_bench.decode import report
from flexq_bench.decode.architecture import check_capacity, of_catalog, of_config
from flexq_bench.decode.case import (
    FULL_PRECISION,
    CachedScheme,
    DecodeCase,
    Setup,
    check_cache,
    read_scheme,
)
from flexq_bench.decode.checkpoint_cache import CalibrationText, CheckpointCache, key_of
from flexq_bench.decode.measurement import count_missing
from flexq_bench.decode.records import ServingCase
from flexq_bench.decode.rounded_weights import runnable_formats
from flexq_bench.decode.runs import (
    measure_decodes,
    measure_servings,
    run_to_measure,
    stored_results,
)
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs.command_lines import command
from flexq_bench.runs.lifecycle import OpenRun, open_run
from flexq_bench.runs.result_files import ResultFiles
from flexq_bench.schemes.model_files import ModelFiles, is_there, model_at
from flexq_bench.schemes.registry import resolve, without_cache
from flexq_bench.schemes.scheme import Scheme
from flexq_bench.sweeps.text import split_names
from flexq_bench.workloads.models import load_catalog

_DEFAULT = "fp16,smoothquant-w8a8,flexq-w6ax"
_UNCALIBRATED_DEFAULT = "fp16,flexq-w6ax"
_RESUME = "--resume"

log = logging.getLogger(__name__)


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
    names = [cached.scheme for cached in schemes if cached.scheme != FULL_PRECISION]
    quantizing = {name: resolve(name) for name in names}
    if model in catalog:
        architecture = of_catalog(catalog[model])
        check_capacity(capacity, architecture.dimensions.context, model)
        for scheme in quantizing.values():
            runnable_formats(scheme, architecture)
        return {}
    if not is_there(path):
        return {}
    files = model_at(path)
    if files.gguf is None:  # a GGUF file is checked when it is loaded
        architecture = of_config(files.config(), files.name)
        check_capacity(capacity, architecture.dimensions.context, model)
        for scheme in quantizing.values():
            runnable_formats(scheme, architecture)
    for scheme in quantizing.values():
        _check_calibration(scheme, calibration)
    cache = CheckpointCache()
    return {
        name: str(_checkpoint(cache, files, model, scheme, device, seed, calibration))
        for name, scheme in quantizing.items()
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
    with ended_by_terminate():
        ran = subprocess.run(
            [sys.executable, "-m", "flexq_bench", "quantize", model, *options, "--json"],
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


def decode(
    setup: Setup,
    cases: Sequence[DecodeCase],
    resume: str | None,
    db: str | None,
    files: ResultFiles,
) -> int:
    """Decode every case and print a comparison of the schemes; returns the exit code."""
    processes = {case.key: setup.process_count(case) for case in cases}
    keys = list(processes)
    records: dict[str, DecodeRecord] = {}

    def measure(run: OpenRun, stored: Callable[[], None]) -> None:
        with _progress(count_missing(setup, cases, records)) as advance:

            def on_record(record: DecodeRecord) -> None:
                stored()
                records[record.case] = record
                advance(report.decode_line(record, processes[record.case]))

            measure_decodes(run, setup, cases, records, on_record)

    with open_database(db, create=resume is None) as database:
        run = run_to_measure(database, keys, resume)
        if resume is not None:
            records |= stored_results(database, run, DecodeRecord)
        code = _measure_in_run(database, run, measure)
    ordered = [records[key] for key in keys if key in records]
    out = console(stderr=files.uses_stdout)
    if ordered:
        print_unbroken(out, report.decode_table(ordered))
    for explanation in report.explanations(ordered):
        print_unbroken(out, report.explanation_table(explanation))
    return _finish(ordered, database, run, files, code)


def serve(
    setup: Setup,
    cases: Sequence[ServingCase],
    resume: str | None,
    db: str | None,
    files: ResultFiles,
) -> int:
    """Serve the same requests under every scheme and batch limit; returns the exit code."""
    records: dict[str, ServingRecord] = {}
    keys = [case.key(setup) for case in cases]

    def measure(run: OpenRun, stored: Callable[[], None]) -> None:
        missing = [case for case in cases if case.key(setup) not in records]
        with _progress(len(missing)) as advance:

            def on_record(record: ServingRecord) -> None:
                stored()
                records[record.case] = record
                advance(report.serving_line(record))

            measure_servings(run, setup, missing, on_record)

    with open_database(db, create=resume is None) as database:
        run = run_to_measure(database, keys, resume)
        if resume is not None:
            records |= stored_results(database, run, ServingRecord)
        code = _measure_in_run(database, run, measure)
    ordered = [records[key] for key in keys if key in records]
    if ordered:
        print_unbroken(console(stderr=files.uses_stdout), report.serving_table(ordered))
    return _finish(ordered, database, run, files, code)


def _measure_in_run(
    database: Database, run: RunInfo, measure: Callable[[OpenRun, Callable[[], None]], None]
) -> int:
    """Measure within the run; returns the exit code.

    measure: called with the open run, and with a function to call after each stored record. After
    an interrupt, or a failure with stored records, the command that resumes the run is printed.
    """
    count = 0

    def stored() -> None:
        nonlocal count
        count += 1

    try:
        with open_run(database, run, current_commit()) as opened:
            # The argument of --resume, in case this process is killed.
            log.info("run %s", opened.info.uuid[:8])
            measure(opened, stored)
    except KeyboardInterrupt:
        return say_interrupted(_resume_command(run))
    except Exception:
        if count:
            log.warning(
                "what was measured before is stored, continue with %s", _resume_command(run)
            )
        raise
    return int(ExitCode.PASS)


def _resume_command(run: RunInfo) -> str:
    """Return the command line of this process, with the option that resumes the run."""
    arguments = sys.argv[1:]
    if _RESUME in arguments:
        return command(*arguments)
    return command(*arguments, _RESUME, run.uuid[:8])


def _finish(
    records: Sequence[DecodeRecord | ServingRecord],
    database: Database,
    run: RunInfo,
    files: ResultFiles,
    code: int,
) -> int:
    out = console(stderr=files.uses_stdout)
    if any(record.weights == "synthetic" for record in records):
        say(
            out,
            "weights are random, of the model's true shapes, rounded to nearest: for speed and "
            "memory, not sense",
        )
    for record in records:
        if record.detail:
            say(out, f"{record.scheme}: {record.detail}")
    files.write(records)
    for path in files.paths:
        say(out, f"records: {path}")
    say(out, f"stored {len(records)} results of run {run.uuid[:8]} in {database.url}")
    return code


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Print one line per result, above a progress bar on a terminal. total: expected results."""
    with progress("measuring", total) as bar:

        def advance(line: str) -> None:
            bar.advance()
            say(bar.out, line)

        yield advance
