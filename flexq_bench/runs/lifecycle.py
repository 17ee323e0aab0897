"""The life of a run: begin it or go on with it, store its results as they come, mark its end.

`open_run` is the only place that marks a run as running, and the place that marks every end:

| the block ends by                                         | status                          |
| --------------------------------------------------------- | ------------------------------- |
| its last line                                             | `OpenRun.status`, else complete |
| Ctrl-C, SIGTERM                                           | interrupted                     |
| CancelledError: the work was taken back                   | interrupted                     |
| BrokenPipeError, SystemExit: nobody reads on              | interrupted                     |
| GeneratorExit: the caller took no more results            | interrupted                     |
| any other exception                                       | failed                          |

What was stored stays in every case, and an interrupted or failed run can be resumed. Only a process
that is killed without an exception (SIGKILL, power) leaves a run `running`: `end_dead_runs` marks
it as interrupted, when the next run begins on that host or somebody asks for it.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from db import queries
from db.encoding import AnyRecord
from db.engine import Database, Session
from db.errors import AWAY, DatabaseError, FileMovedError, ResultsFileError
from db.exchange import write_records
from db.queries import Filters, OwnedRun, export_accuracy, export_decodes
from db.queries.records import export_records
from db.records import CommitInfo, Record, RunInfo
from db.store import add_record, begin_run, end_runs_of, finish_run
from flexq_bench.errors import CancelledError, InfrastructureError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.runs.outage import through_outages
from flexq_bench.runs.owner import is_dead, this_process
from flexq_bench.runs.record import build_record
from flexq_bench.runs.worker import Outcome
from workloads.case import Case

OnRecord = Callable[[Record], None]
# Exceptions of a run that was stopped, not broken; so is what is no Exception (KeyboardInterrupt,
# SystemExit, GeneratorExit).
_STOPS = (CancelledError, BrokenPipeError)

log = logging.getLogger(__name__)


def new_run(suite: str, trigger: str, plan: Sequence[str]) -> RunInfo:
    """A run that nobody has stored yet. plan: keys of its cases."""
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
    """A run that is under way in this process.

    status: the run's final status if its block ends without an exception. unwritten: writes that
    found the database's file gone.
    """

    database: Database
    info: RunInfo
    commit: CommitInfo
    status: str = "complete"
    unwritten: list[Callable[[Session], object]] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Store the record of a case in a transaction of its own."""
        self.store(lambda session: add_record(session, record))

    def store(self, write: Callable[[Session], object]) -> None:
        """Store results of another kind in a transaction of their own.

        While the database is away it waits: `write` may then be called again. Raises
        InfrastructureError if the database stays away.
        """
        try:
            through_outages(self.database, write)
        except FileMovedError:
            self.unwritten.append(write)
            raise

    def store_now(self, write: Callable[[Session], object]) -> None:
        """Store without waiting for a database that is away."""
        try:
            with self.database.session() as session:
                write(session)
        except FileMovedError:
            self.unwritten.append(write)
            raise


@contextmanager
def open_run(database: Database, run: RunInfo, commit: CommitInfo) -> Iterator[OpenRun]:
    """Begin a run, or go on with the one of its uuid or idempotency key; mark its end.

    Within the block SIGTERM raises KeyboardInterrupt, as Ctrl-C does. Whatever ends the block is
    raised again after the run is marked. Raises what begin_run raises, and InfrastructureError if
    the database's file was deleted or replaced meanwhile: the message names the file that the run's
    results were written to instead.
    """
    with ended_by_terminate():
        with suppress(*AWAY):  # then the next run does it
            end_dead_runs(database)
        info = through_outages(
            database,
            lambda session: begin_run(
                session, replace(run, status="running"), commit, this_process()
            ),
        )
        opened = OpenRun(database, info, commit)
        try:
            yield opened
        except BaseException as error:
            _mark(opened, status_after(error))
            raise
        _mark(opened, opened.status)


def end_dead_runs(database: Database) -> list[OwnedRun]:
    """Mark the runs whose processes were killed on this host as interrupted; which they were."""
    dead = dead_runs(database)
    for run in dead:
        assert run.owner is not None
        with database.session() as session:
            end_runs_of(session, run.owner, at=datetime.now(UTC))
        log.warning("run %s is interrupted: %s", run.uuid[:8], "its process was killed")
    return dead


def dead_runs(database: Database) -> list[OwnedRun]:
    """The runs that say that they are under way, and whose process on this host is gone."""
    with database.session() as session:
        running = queries.owned_runs(session)
    return [run for run in running if run.owner is not None and is_dead(run.owner)]


def status_after(error: BaseException) -> str:
    """The status of a run that this exception ended."""
    was_stopped = isinstance(error, _STOPS) or not isinstance(error, Exception)
    return "interrupted" if was_stopped else "failed"


def store_outcomes(
    run: OpenRun, cases: Sequence[Case], outcomes: Iterable[Outcome], *, on_record: OnRecord
) -> None:
    """Store the outcome of each case as it comes.

    on_record is called after a result is stored. A case that failed is a result and does not stop
    the others; without an outcome of each case the run fails. Raises what `outcomes` raises.
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


def verdict_of_run(records: Sequence[Record], missing: Sequence[str]) -> ExitCode:
    """The exit code that follows from the results of one run.

    A wrong kernel is a regression (1), a planned case without a record is missing (4), a case that
    failed means that something here is broken (5); noisy and unsupported cases pass.
    """
    statuses = {record.status for record in records}
    if "incorrect" in statuses:
        return ExitCode.REGRESSION
    if missing:
        return ExitCode.MISSING
    if "failed" in statuses:
        return ExitCode.INFRASTRUCTURE
    return ExitCode.PASS


def worst(codes: Iterable[int]) -> int:
    """The exit code of several runs: what is missing or wrong anywhere is so of all of them."""
    ranked = (
        ExitCode.INFRASTRUCTURE,
        ExitCode.MISSING,
        ExitCode.REGRESSION,
        ExitCode.AMBIGUOUS,
    )
    given = set(codes)
    return next((int(code) for code in ranked if code in given), max(given, default=0))


def _mark(run: OpenRun, status: str) -> None:
    """Mark the end, also if Ctrl-C comes once more meanwhile."""
    try:
        _finish(run, status)
    except KeyboardInterrupt:
        _finish(run, status)
        raise


def _finish(run: OpenRun, status: str) -> None:
    store = run.store if status == "complete" else run.store_now  # who stops does not wait
    try:
        store(lambda session: finish_run(session, run.info.uuid, status))
    except FileMovedError as error:
        _rescue(run, error)
    except (DatabaseError, InfrastructureError) as error:
        # The results are stored one by one before this; only the label is lost.
        log.warning("run %s could not be marked %s: %s", run.info.uuid, status, error)


def _rescue(run: OpenRun, error: FileMovedError) -> NoReturn:
    """Write all results of a run to a file beside the one that is gone, and raise."""
    with run.database.opened_file_session() as session:
        for write in run.unwritten:
            write(session)
        filters = Filters(runs=(run.info.uuid,))
        records: list[AnyRecord] = [
            *export_records(session, filters),
            *export_accuracy(session, filters),
            *export_decodes(session, filters),
        ]
    if not records:
        raise InfrastructureError(f"{error}; run {run.info.uuid[:8]} had no results yet") from error
    name = f"{Path(run.database.url).name}.{run.info.uuid[:8]}.jsonl"
    path = Path(run.database.url).with_name(name)
    try:
        write_records(path, records)
    except ResultsFileError:  # its folder is gone as well
        path = Path(tempfile.gettempdir(), name)
        write_records(path, records)
    message = (
        f"{error}; {len(records)} results of run {run.info.uuid[:8]} are in {path}: "
        f"flexq-bench db import {path} stores them"
    )
    log.error("%s", message)  # of several runs only one message becomes the last line
    raise InfrastructureError(message) from error
