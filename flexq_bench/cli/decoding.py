"""The work of `decode`: quantize what is not cached, measure, print tables."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import typer
from rich.table import Table

from flexq_bench.checkpoints.folders import is_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.cli.output import console, print_unbroken, say, say_interrupted
from flexq_bench.cli.progress import progress
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import DecodeRecord, RunInfo, ServingRecord
from flexq_bench.decode import report
from flexq_bench.decode.architecture import (
    NotDecodedError,
    check_capacity,
    of_catalog,
    of_config,
)
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
from flexq_bench.decode.modules import ModuleWeights
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
R = TypeVar("R", DecodeRecord, ServingRecord)

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
        try:
            architecture = of_config(files.config(), files.name)
        except NotDecodedError:
            check_capacity(capacity, ModuleWeights(files).context, model)
        else:
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
    work = _Work(
        DecodeRecord,
        list(processes),
        lambda records: count_missing(setup, cases, records),
        lambda run, records, on_record: measure_decodes(run, setup, cases, records, on_record),
        lambda record: report.decode_line(record, processes[record.case]),
        lambda records: (
            report.decode_table(records),
            *map(report.explanation_table, report.explanations(records)),
        ),
    )
    return _carry_out(work, resume, db, files)


def serve(
    setup: Setup,
    cases: Sequence[ServingCase],
    resume: str | None,
    db: str | None,
    files: ResultFiles,
) -> int:
    """Serve the same requests under every scheme and batch limit; returns the exit code."""

    def missing(records: Mapping[str, ServingRecord]) -> list[ServingCase]:
        return [case for case in cases if case.key(setup) not in records]

    work = _Work(
        ServingRecord,
        [case.key(setup) for case in cases],
        lambda records: len(missing(records)),
        lambda run, records, on_record: measure_servings(run, setup, missing(records), on_record),
        report.serving_line,
        lambda records: [report.serving_table(records)],
    )
    return _carry_out(work, resume, db, files)


@dataclass(frozen=True, slots=True)
class _Work(Generic[R]):
    """Decodes or servings to measure in one run.

    keys: of the cases, in the order of tables. count_missing: expected results, given the records
    so far by case. measure: called with the run, those records, and a function to call with each
    record after it is stored. line, tables: texts of one record, and of all.
    """

    kind: type[R]
    keys: Sequence[str]
    count_missing: Callable[[Mapping[str, R]], int]
    measure: Callable[[OpenRun, Mapping[str, R], Callable[[R], None]], None]
    line: Callable[[R], str]
    tables: Callable[[Sequence[R]], Iterable[Table]]


def _carry_out(work: _Work[R], resume: str | None, db: str | None, files: ResultFiles) -> int:
    """Measure in a new or resumed run, print and write the records; returns the exit code.

    After an interrupt, or a failure with stored records, the command that resumes the run is
    printed.
    """
    records: dict[str, R] = {}
    code, has_new = int(ExitCode.PASS), False
    with open_database(db, create=resume is None) as database:
        run = run_to_measure(database, work.keys, resume)
        if resume is not None:
            records |= stored_results(database, run, work.kind)
        try:
            with (
                open_run(database, run, current_commit()) as opened,
                progress("measuring", work.count_missing(records)) as bar,
            ):
                # The argument of --resume, in case this process is killed.
                log.info("run %s", opened.info.uuid[:8])

                def on_record(record: R) -> None:
                    nonlocal has_new
                    has_new = True
                    records[record.case] = record
                    bar.advance()
                    say(bar.out, work.line(record))

                work.measure(opened, records, on_record)
        except KeyboardInterrupt:
            code = say_interrupted(_resume_command(run))
        except Exception:
            if has_new:
                resuming = _resume_command(run)
                log.warning("what was measured before is stored, continue with %s", resuming)
            raise
    ordered = [records[key] for key in work.keys if key in records]
    out = console(stderr=files.uses_stdout)
    for table in work.tables(ordered) if ordered else ():
        print_unbroken(out, table)
    if any(record.weights == "synthetic" for record in ordered):
        say(
            out,
            "weights are random, of the model's true shapes, rounded to nearest: for speed and "
            "memory, not sense",
        )
    for record in ordered:
        if record.detail:
            say(out, f"{record.scheme}: {record.detail}")
    files.write(ordered)
    for path in files.paths:
        say(out, f"records: {path}")
    say(out, f"stored {len(ordered)} results of run {run.uuid[:8]} in {database.url}")
    return code


def _resume_command(run: RunInfo) -> str:
    """Return the command line of this process, with the option that resumes the run."""
    arguments = sys.argv[1:]
    if _RESUME in arguments:
        return command(*arguments)
    return command(*arguments, _RESUME, run.uuid[:8])
