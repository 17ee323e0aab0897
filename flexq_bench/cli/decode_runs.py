"""What `decode` does once its options are read: measure, store each result, print tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from db import queries
from db.decode_records import DecodeRecord, ServingRecord
from db.decode_store import add_decodes
from db.engine import Database, open_database
from db.records import RunInfo
from flexq_bench.cli.output import console, say, show_whole
from flexq_bench.cli.resuming import check_same_work
from flexq_bench.decode import SUITE, report
from flexq_bench.decode import measurement as measuring
from flexq_bench.decode.case import Setup
from flexq_bench.decode.records import ServingCase
from flexq_bench.decode.requests import LOGNORMAL, drawn_requests, read_requests
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import INTERRUPTED, ExitCode
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs import command_lines as invocation
from flexq_bench.runs.lifecycle import OpenRun, new_run, open_run
from flexq_bench.runs.result_files import ResultFiles

_GIB = 1 << 30
_RESUME = "--resume"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """batch_limits: of each serving. memory_gib: None, no limit. lengths: a file; None: drawn.

    step_tokens: of prompts that are read between two steps, at most.
    """

    batch_limits: tuple[int, ...]
    memory_gib: float | None
    requests: int
    longest: int
    lengths: str | None
    step_tokens: int


def decode(
    setup: Setup,
    batches: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: tuple[int, ...],
    resume: str | None,
    db: str | None,
    files: ResultFiles,
) -> int:
    """Decode every case, and say how the schemes compare; the exit code."""
    cases = measuring.cases_of(setup, batches, prompt_tokens, new_tokens)
    wanted = {case.key: setup.wanted(case) for case in cases}
    keys = list(wanted)
    records: dict[str, DecodeRecord] = {}

    def measure(run: OpenRun, store: _Store) -> None:
        with _progress(measuring.count_lacking(setup, cases, records)) as advance:
            for record in measuring.decode_all(setup, cases, run.info, run.commit, dict(records)):
                store(record)
                records[record.case] = record
                advance(report.decode_line(record, wanted[record.case]))

    with open_database(db, create=resume is None) as database:
        run = _run_to_measure(database, keys, resume)
        if resume is not None:
            with database.session() as session:
                records |= {r.case: r for r in queries.decode_results(session, runs=[run.uuid])}
        code = _carry_out(database, run, measure)
    ordered = [records[key] for key in keys if key in records]
    out = console(stderr=files.uses_stdout)
    if ordered:
        show_whole(out, report.decode_table(ordered))
    for explanation in report.explanations(ordered):
        show_whole(out, report.explanation_table(explanation))
    return _finish(ordered, database, run, files, code)


def serve(
    setup: Setup, wanted: Serving, resume: str | None, db: str | None, files: ResultFiles
) -> int:
    """Serve the same requests under every scheme and batch limit; the exit code."""
    cases = _servings(setup, wanted)
    records: dict[str, ServingRecord] = {}
    keys = [case.key(setup) for case in cases]

    def measure(run: OpenRun, store: _Store) -> None:
        lacking = [case for case in cases if case.key(setup) not in records]
        if not lacking:
            return
        with _progress(len(lacking)) as advance:
            for record in measuring.serve_all(setup, lacking, run.info, run.commit):
                store(record)
                records[record.case] = record
                advance(report.serving_line(record))

    with open_database(db, create=resume is None) as database:
        run = _run_to_measure(database, keys, resume)
        if resume is not None:
            with database.session() as session:
                records |= {r.case: r for r in queries.serving_results(session, runs=[run.uuid])}
        code = _carry_out(database, run, measure)
    ordered = [records[key] for key in keys if key in records]
    if ordered:
        show_whole(console(stderr=files.uses_stdout), report.serving_table(ordered))
    return _finish(ordered, database, run, files, code)


def _servings(setup: Setup, wanted: Serving) -> list[ServingCase]:
    if wanted.lengths is None:
        requests = drawn_requests(wanted.requests, wanted.longest, setup.seed)
        lengths = f"{LOGNORMAL}, cut to {wanted.longest // 2}"
    else:
        requests = read_requests(Path(wanted.lengths))[: wanted.requests]
        lengths = Path(wanted.lengths).name
    memory = None if wanted.memory_gib is None else round(wanted.memory_gib * _GIB)
    # With a memory limit it is that, not a list of batches, that decides.
    limits = wanted.batch_limits if memory is None else wanted.batch_limits[-1:]
    if not limits:
        raise UsageError("how many at a time? Give --batch-limit")
    return [
        ServingCase(
            of.scheme, limit, memory, tuple(requests), lengths, wanted.step_tokens, of.kv_bits
        )
        for of in setup.schemes
        for limit in limits
    ]


def _run_to_measure(database: Database, keys: Sequence[str], resume: str | None) -> RunInfo:
    """A new run, or the one to go on with. Raises UsageError if that one is of other cases."""
    if resume is None:
        return new_run(SUITE, "manual", keys)
    with database.session() as session:
        summary = queries.run_by_uuid_prefix(session, resume)
        check_same_work(summary, SUITE, current_commit())
        run = queries.run_info(session, summary.uuid)
    if run.plan != tuple(keys):
        raise UsageError(
            f"run {run.uuid[:8]} was begun with other options: repeat those, or start a new run"
        )
    return run


_Store = Callable[[DecodeRecord | ServingRecord], None]


def _carry_out(database: Database, run: RunInfo, measure: Callable[[OpenRun, _Store], None]) -> int:
    """Measure within the run, each record in a transaction of its own; the exit code.

    Stopped, or failed after something was stored, it says how to go on.
    """
    stored = 0
    try:
        with open_run(database, run, current_commit()) as opened:
            # What --resume takes, should this process be killed.
            log.info("run %s", opened.info.uuid[:8])

            def store(record: DecodeRecord | ServingRecord) -> None:
                nonlocal stored
                opened.store(lambda session: add_decodes(session, [record]))
                stored += 1

            measure(opened, store)
    except KeyboardInterrupt:
        say(
            console(stderr=True),
            f"interrupted: what was measured is stored, go on with {_again(run)}",
        )
        return INTERRUPTED
    except Exception:
        if stored:
            log.warning("what was measured before is stored, go on with %s", _again(run))
        raise
    return int(ExitCode.PASS)


def _again(run: RunInfo) -> str:
    """The command line that was given, with the run to go on with."""
    given = sys.argv[1:]
    if _RESUME in given:
        return invocation.command(*given)
    return invocation.command(*given, _RESUME, run.uuid[:8])


def _finish(
    records: Sequence[DecodeRecord | ServingRecord],
    database: Database,
    run: RunInfo,
    files: ResultFiles,
    code: int,
) -> int:
    out = console(stderr=files.uses_stdout)
    if any(record.weights == "synthetic" for record in records):
        say(out, "weights are random, of the model's true shapes: for speed and memory, not sense")
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
    """A line a result, above a bar where a person looks at it. total: results that are to come."""
    err = console(stderr=True)
    done = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    name = TextColumn("{task.description}")
    with Progress(name, *done, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("measuring", total=total)

        def advance(line: str) -> None:
            bar.update(task, advance=1)
            say(bar.console, line)

        yield advance
