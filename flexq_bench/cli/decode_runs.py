"""The runs of `decode`: measure, show progress, print tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from flexq_bench.cli.output import console, print_unbroken, say
from flexq_bench.cli.progress import progress
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.records import DecodeRecord, RunInfo, ServingRecord
from flexq_bench.decode import report
from flexq_bench.decode.case import DecodeCase, Setup
from flexq_bench.decode.measurement import count_missing
from flexq_bench.decode.records import ServingCase
from flexq_bench.decode.runs import (
    measure_decodes,
    measure_servings,
    run_to_measure,
    stored_decodes,
    stored_servings,
)
from flexq_bench.exit_codes import INTERRUPTED, ExitCode
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs import command_lines as invocation
from flexq_bench.runs.lifecycle import OpenRun, open_run
from flexq_bench.runs.result_files import ResultFiles

_RESUME = "--resume"

log = logging.getLogger(__name__)


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
            records |= stored_decodes(database, run)
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
            records |= stored_servings(database, run)
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
        say(
            console(stderr=True),
            f"interrupted: what was measured is stored, continue with {_resume_command(run)}",
        )
        return INTERRUPTED
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
        return invocation.command(*arguments)
    return invocation.command(*arguments, _RESUME, run.uuid[:8])


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
