"""Lifecycle of a run: begin or resume it, store its results one by one, set its final status.

Only `open_run` sets the status of a run, to running and at its end:

| the block ends by                                         | status                          |
| --------------------------------------------------------- | ------------------------------- |
| its last line                                             | `OpenRun.status`, else complete |
| Ctrl-C, SIGTERM, SIGHUP                                   | interrupted                     |
| CancelledError: the request was cancelled                 | interrupted                     |
| BrokenPipeError, SystemExit: the output was closed        | interrupted                     |
| GeneratorExit: the caller closed the iterator of results  | interrupted                     |
| any other exception                                       | failed                          |

Stored results stay in every case, and an interrupted or failed run can be resumed. Only a process
that is killed without an exception (SIGKILL, power loss) leaves a run `running`: `end_dead_runs`
marks it as interrupted, when the next run begins on that host or with `status --reap`.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from flexq_bench.db.engine import Database, Session
from flexq_bench.db.errors import UNAVAILABLE, DatabaseError, FileMovedError, ResultsFileError
from flexq_bench.db.exchange import write_records
from flexq_bench.db.queries import Filters, stored_records
from flexq_bench.db.records import MODEL_KINDS, AnyRecord, CommitInfo, Record, RunInfo
from flexq_bench.db.store import add_record, begin_run, finish_run
from flexq_bench.errors import CancelledError, InfrastructureError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.runs.commit_history import store_history, warn_once
from flexq_bench.runs.dead_runs import end_dead_runs
from flexq_bench.runs.owner_process import this_process
from flexq_bench.runs.record import build_record
from flexq_bench.runs.transactions import run_transaction
from flexq_bench.runs.worker import MeasuredCase
from flexq_bench.workloads.case import Case

OnRecord = Callable[[Record], None]
# Exceptions that interrupt a run; all others derived from Exception make it fail.
# KeyboardInterrupt, SystemExit and GeneratorExit interrupt it too.
_INTERRUPTIONS = (CancelledError, BrokenPipeError)

log = logging.getLogger(__name__)


def new_run(suite: str, trigger: str, plan: Sequence[str]) -> RunInfo:
    """Create a run, not stored yet. plan: keys of its cases."""
    identity = str(uuid.uuid4())
    return RunInfo(
        uuid=identity,
        suite=suite,
        trigger=trigger,
        status="running",
        created_at=datetime.now(UTC).isoformat(),
        idempotency_key=identity,
        plan=tuple(plan),
    )


@dataclass(slots=True)
class OpenRun:
    """A run in progress in this process.

    status: the run's final status if its block ends without an exception. unwritten: writes that
    failed because the database's file was deleted or replaced.
    """

    database: Database
    info: RunInfo
    commit: CommitInfo
    status: str = "complete"
    unwritten: list[Callable[[Session], object]] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Store the record of a case in its own transaction."""
        self.store(lambda session: add_record(session, record))

    def store(self, write: Callable[[Session], object]) -> None:
        """Call `write` in its own transaction.

        Waits while the database is unavailable; `write` may then be called again. Raises
        InfrastructureError if the database stays unavailable.
        """
        try:
            run_transaction(self.database, write)
        except FileMovedError:
            self.unwritten.append(write)
            raise

    def store_now(self, write: Callable[[Session], object]) -> None:
        """Store without waiting for an unavailable database."""
        try:
            with self.database.session() as session:
                write(session)
        except FileMovedError:
            self.unwritten.append(write)
            raise


@contextmanager
def open_run(
    database: Database,
    run: RunInfo,
    commit: CommitInfo,
    options: Mapping[str, Any] | None = None,
) -> Iterator[OpenRun]:
    """Begin a run, or resume the one with its uuid or idempotency key; set its final status.

    options: see begin_run.

    Within the block SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does. An exception that
    ends the block is raised again after the status is stored. Raises what begin_run raises, and
    InfrastructureError if the database's file was deleted or replaced meanwhile: the message names
    the file that the run's results were written to instead.
    """
    with ended_by_terminate():
        with suppress(*UNAVAILABLE):  # the next run repeats it
            end_dead_runs(database)
        if note := store_history(database, commit):
            warn_once(note)
        info = run_transaction(
            database,
            lambda session: begin_run(
                session, replace(run, status="running"), commit, this_process(), options
            ),
        )
        opened = OpenRun(database, info, commit)
        try:
            yield opened
        except BaseException as error:
            _set_final_status(opened, status_after(error))
            raise
        _set_final_status(opened, opened.status)


def status_after(error: BaseException) -> str:
    """The final status of a run that ended with this exception."""
    interrupted = isinstance(error, _INTERRUPTIONS) or not isinstance(error, Exception)
    return "interrupted" if interrupted else "failed"


def store_results(
    run: OpenRun, cases: Sequence[Case], outcomes: Iterable[MeasuredCase], *, on_record: OnRecord
) -> None:
    """Store each outcome when it arrives, then call on_record with its record.

    A failed case is a result and does not stop the others; the run fails if a case has no outcome.
    Raises any exception of `outcomes`.
    """
    missing = dict.fromkeys(case.key for case in cases)
    for outcome in outcomes:
        record = build_record(
            outcome.case,
            outcome.measured,
            run.info,
            run.commit,
            outcome.worker.device,
            outcome.worker.environment,
            outcome.attempt,
        )
        run.add(record)
        missing.pop(record.case, None)
        on_record(record)
    if missing:
        run.status = "failed"


def exit_code_of_run(records: Sequence[Record], missing: Sequence[str]) -> ExitCode:
    """The exit code for the results of one run.

    A wrong kernel is a regression (1), a planned case without a record is missing (4), a failed
    case is an infrastructure failure (5); noisy and unsupported cases pass.
    """
    statuses = {record.status for record in records}
    if "incorrect" in statuses:
        return ExitCode.REGRESSION
    if missing:
        return ExitCode.MISSING
    if "failed" in statuses:
        return ExitCode.INFRASTRUCTURE
    return ExitCode.PASS


def _set_final_status(run: OpenRun, status: str) -> None:
    """Store the final status, also if Ctrl-C is pressed again meanwhile."""
    try:
        _finish(run, status)
    except KeyboardInterrupt:
        _finish(run, status)
        raise


def _finish(run: OpenRun, status: str) -> None:
    store = run.store if status == "complete" else run.store_now  # an interrupt does not wait
    try:
        store(lambda session: finish_run(session, run.info.uuid, status))
    except FileMovedError as error:
        _write_rescue_file(run, error)
    except (DatabaseError, InfrastructureError) as error:
        # All results are stored already; only the status is lost.
        log.warning("run %s could not be marked %s: %s", run.info.uuid, status, error)


def _write_rescue_file(run: OpenRun, error: FileMovedError) -> NoReturn:
    """Write all results of a run to a file next to the missing database file, and raise."""
    with run.database.opened_file_session() as session:
        for write in run.unwritten:
            write(session)
        filters = Filters(runs=(run.info.uuid,))
        records: list[AnyRecord] = [
            record
            for kind in (Record, *MODEL_KINDS.values())
            for record in stored_records(session, kind, filters)
        ]
    if not records:
        raise InfrastructureError(f"{error}; run {run.info.uuid[:8]} had no results yet") from error
    name = f"{Path(run.database.url).name}.{run.info.uuid[:8]}.jsonl"
    path = Path(run.database.url).with_name(name)
    try:
        write_records(path, records)
    except ResultsFileError:  # its folder is missing as well
        path = Path(tempfile.gettempdir(), name)
        write_records(path, records)
    message = (
        f"{error}; {len(records)} results of run {run.info.uuid[:8]} are in {path}: "
        f"flexq-bench db import {path} stores them"
    )
    log.error("%s", message)  # of several runs, only one exception is printed at the end
    raise InfrastructureError(message) from error
