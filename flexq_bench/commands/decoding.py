"""What `decode` does once its options are read: measure, store each result, print tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from db.decode_records import DecodeRecord, ServingRecord
from db.decode_store import add_decodes
from db.engine import Database, open_database
from db.records import RunInfo
from db.store import begin_run, finish_run
from flexq_bench.commands.output import console, say
from flexq_bench.commands.result_files import ResultFiles
from flexq_bench.commands.stopping import ended_by_terminate
from flexq_bench.decode import SUITE, measuring, report
from flexq_bench.decode.measuring import Setup
from flexq_bench.decode.requests import LOGNORMAL, drawn_requests, read_requests
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.provenance import current_commit
from flexq_bench.running import new_run

_GIB = 1 << 30

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """batch_limits: of each serving. memory_gib: None, no limit. lengths: a file; None: drawn."""

    batch_limits: tuple[int, ...]
    memory_gib: float | None
    requests: int
    longest: int
    lengths: str | None


def decode(
    setup: Setup,
    batches: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: tuple[int, ...],
    db: str | None,
    files: ResultFiles,
) -> int:
    """Decode every case, and say how the schemes compare; the exit code."""
    cases = measuring.cases_of(setup, batches, prompt_tokens, new_tokens)
    run = new_run(SUITE, "manual", [case.key for case in cases])
    records: list[DecodeRecord] = []
    with open_database(db) as database, _storing(database, run) as store, _progress() as advance:
        for record in measuring.decode_all(setup, cases, run, current_commit(), advance):
            store(record)
            records.append(record)
    out = console(stderr=files.uses_stdout)
    out.print(report.decode_table(records))
    for head in records:
        base = next((r for r in records if _comparable(r, head)), None)
        explanation = report.explain(base, head) if base is not None else None
        if explanation is not None:
            out.print(report.explanation_table(explanation))
    return _finish(records, database, run, files)


def serve(setup: Setup, wanted: Serving, db: str | None, files: ResultFiles) -> int:
    """Serve the same requests under every scheme and batch limit; the exit code."""
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
    keys = [
        measuring.serving_key(setup, scheme, limit, memory, len(requests))
        for scheme in setup.schemes
        for limit in limits
    ]
    run = new_run(SUITE, "manual", keys)
    records: list[ServingRecord] = []
    with open_database(db) as database, _storing(database, run) as store, _progress() as advance:
        commit = current_commit()
        for record in measuring.serve_all(
            setup, requests, lengths, limits, memory, run, commit, advance
        ):
            store(record)
            records.append(record)
    console(stderr=files.uses_stdout).print(report.serving_table(records))
    return _finish(records, database, run, files)


def _comparable(base: DecodeRecord, head: DecodeRecord) -> bool:
    """Whether base is the first scheme's decode of the same batch and tokens."""
    same = (base.batch, base.prompt_tokens, base.new_tokens)
    return base.scheme != head.scheme and same == (head.batch, head.prompt_tokens, head.new_tokens)


def _finish(
    records: Sequence[DecodeRecord | ServingRecord],
    database: Database,
    run: RunInfo,
    files: ResultFiles,
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
    return int(ExitCode.PASS)


@contextmanager
def _storing(
    database: Database, run: RunInfo
) -> Iterator[Callable[[DecodeRecord | ServingRecord], None]]:
    """Declare the run; each record in a transaction of its own; the run's status at the end."""
    with database.session() as session:
        begin_run(session, run, current_commit())

    def store(record: DecodeRecord | ServingRecord) -> None:
        with database.session() as session:
            add_decodes(session, [record])

    status = "failed"
    try:
        with ended_by_terminate():
            yield store
        status = "complete"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        with database.session() as session:
            finish_run(session, run.uuid, status)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What was measured last, on stderr where a person looks at it, else in the log."""
    err = console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("loading", total=None)

        def advance(label: str) -> None:
            log.info("measured %s", label)
            bar.update(task, description=label)

        yield advance
