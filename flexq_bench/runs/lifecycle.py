"""Going through a plan: each result is stored in a transaction of its own as it comes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from db.engine import Database
from db.errors import DatabaseError
from db.records import CommitInfo, Record, RunInfo
from db.store import add_record, begin_run, finish_run
from flexq_bench.errors import CancelledError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.runs.executor import Executor
from flexq_bench.runs.record import build_record
from workloads.case import Case

OnRecord = Callable[[Record], None]

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


def execute_plan(
    database: Database,
    executor: Executor,
    cases: Sequence[Case],
    run: RunInfo,
    commit: CommitInfo,
    *,
    on_record: OnRecord,
) -> None:
    """Declare the run, measure the cases, store each result, and set the run's final status.

    cases: those of the run's plan that are still to be measured. on_record is called after a
    result is stored. A case that fails is a result and doesn't stop the others. On
    KeyboardInterrupt, CancelledError and SystemExit, and on an error of the device or the database,
    what was stored stays, the run is marked interrupted or failed, and the exception goes on to the
    caller.
    """
    with database.session() as session:
        run = begin_run(session, run, commit)
    missing = dict.fromkeys(case.key for case in cases)
    try:
        for outcome in executor.execute(cases):
            record = build_record(
                outcome.case,
                outcome.measured,
                run,
                commit,
                outcome.worker.device,
                outcome.worker.environment,
                outcome.attempt,
            )
            with database.session() as session:
                add_record(session, record)
            missing.pop(record.case, None)
            on_record(record)
    except (KeyboardInterrupt, CancelledError, SystemExit):  # the last: nobody reads what is said
        _finish(database, run, "interrupted")
        raise
    except Exception:
        _finish(database, run, "failed")
        raise
    _finish(database, run, "failed" if missing else "complete")


def verdict_of_run(records: Sequence[Record], missing: Sequence[str]) -> ExitCode:
    """What the results of a run by themselves say.

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


def _finish(database: Database, run: RunInfo, status: str) -> None:
    try:
        with database.session() as session:
            finish_run(session, run.uuid, status)
    except DatabaseError as error:
        # The results are stored one by one before this; only the label is lost.
        log.warning("run %s could not be marked %s: %s", run.uuid, status, error)
