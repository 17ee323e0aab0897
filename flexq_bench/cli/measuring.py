"""Common part of `run` and `sweep`: measure a suite, or resume a run, and report."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer
from rich.console import Console

from flexq_bench.cli.external import OpenedProject
from flexq_bench.cli.output import console, print_unbroken, say, say_interrupted
from flexq_bench.cli.progress import progress as shown_progress
from flexq_bench.cli.stored_options import given_options
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.records import CommitInfo, Record, RunInfo
from flexq_bench.exit_codes import worst_exit_code
from flexq_bench.fleet.pool import Pool
from flexq_bench.fleet.pool_choice import PoolOptions, open_pool
from flexq_bench.fleet.suite_runs import PlannedRun, measure_runs, plan_runs
from flexq_bench.kernels.contract import Backend
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs.command_lines import command, database_arguments
from flexq_bench.runs.cost_estimate import read_costs
from flexq_bench.runs.lifecycle import OnRecord, exit_code_of_run, open_run
from flexq_bench.runs.result_files import ResultFiles
from flexq_bench.runs.resume import read_unfinished
from flexq_bench.runs.table import case_in_words, problem_lines, result_line, results_table
from flexq_bench.stats.baseline import compare_with_baseline
from flexq_bench.sweeps.launches import weighted_table
from flexq_bench.sweeps.plot import write_plot
from flexq_bench.workloads.launches import LaunchTrace
from flexq_bench.workloads.suite import Suite

RESULTS_PAGE = "http://localhost:8501/results"  # of a dashboard with the default port

_MANY_CASES = 100  # of a sweep, above which a person is asked first

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run: database, devices and output files.

    prints_each_result: also print the expected duration before. opened: the project whose kernels
    are measured; None: this program's. trace: of a sweep over a trace's launches: its counts.
    """

    db: str | None
    pool: PoolOptions = field(default_factory=PoolOptions)
    files: ResultFiles = field(default_factory=ResultFiles)
    prints_each_result: bool = False
    opened: OpenedProject | None = None
    trace: LaunchTrace | None = None

    @property
    def measured_commit(self) -> CommitInfo:
        """The commit with which results are stored."""
        return current_commit() if self.opened is None else self.opened.revision.commit

    @property
    def console(self) -> Console:
        """The console for tables and messages."""
        return console(stderr=self.files.uses_stdout)


def read_trace(path: str) -> LaunchTrace:
    """Read a trace of launches, of torch.profiler or FlashInfer-Bench. Raises UsageError."""
    from flexq_bench.exchange.flashinfer_traces import read_launches
    from flexq_bench.exchange.profiler_traces import read_profiler_trace

    is_set = Path(path).is_dir() or path.endswith(".jsonl")
    return read_launches(path) if is_set else read_profiler_trace(path)


def measure_suite(
    suite: Suite, requested_kernels: Sequence[str], trigger: str, options: RunOptions
) -> int:
    """Measure a suite as new runs, one per kind of device; returns the exit code."""
    commit = options.measured_commit
    with open_database(options.db) as database, open_pool(database, options.pool, commit) as pool:
        if options.opened is not None:
            options.opened.check_loaded()
        planned = plan_runs(pool, suite, requested_kernels, trigger)
        announce(database, planned, options)
        return carry_out(database, pool, planned, commit, options)


def resume_run(prefix: str, suite_name: str | None, options: RunOptions) -> int:
    """Resume an interrupted run; returns the exit code.

    Raises UsageError if it is of another suite, commit or backend, or of a GPU that is not
    available: its results would not be comparable.
    """
    commit = options.measured_commit
    pool_options = options.pool
    with open_database(options.db, create=False) as database:
        # Only a cluster measures repetitions; this process measures cases without any result.
        unfinished = read_unfinished(
            database, prefix, suite_name, commit, repetitions=not pool_options.is_local
        )
        run, first = unfinished.run, unfinished.first
        if not unfinished.cases:
            with open_run(database, run, commit):
                pass  # nothing is left: it is complete
            return report(database, run, options)
        if first is not None:
            if pool_options.backend is None and pool_options.device is None:
                backend: Backend = "cuda" if first.backend == "cuda" else "cpu"
                pool_options = replace(pool_options, backend=backend)
            if pool_options.seed is None:
                pool_options = replace(pool_options, seed=first.seed)
        if not pool_options.is_local:
            pool_options = replace(pool_options, repeat=1)  # the run has its jobs
        with open_pool(database, pool_options, commit) as pool:
            kind = pool.kind_to_resume(run, first)
            pool.check(unfinished.cases)
            rest = PlannedRun(run, kind, unfinished.cases)
            return carry_out(database, pool, [rest], commit, replace(options, pool=pool_options))


def announce(database: Database, planned: Sequence[PlannedRun], options: RunOptions) -> None:
    """Print the number of cases, and the expected time if similar ones were measured."""
    if not options.prints_each_result:
        return
    for run in planned:
        kind = run.kind
        with database.session() as session:
            seconds = read_costs(session, kind.gpu).total(run.cases)
        unknown = "nothing like it was measured before"
        took = unknown if seconds is None else f"about {seconds / kind.workers:.0f} s"
        say(options.console, f"{len(run.cases)} cases on {kind.workers} × {kind.gpu}: {took}")
    cases = sum(len(run.cases) for run in planned)
    if cases > _MANY_CASES:
        say(options.console, "fewer: name kernels (--kernels), layers (--layers) or sizes (--m)")
        if sys.stdin.isatty() and sys.stdout.isatty():
            typer.confirm(f"measure {cases} cases?", default=True, abort=True)


def carry_out(
    database: Database,
    pool: Pool,
    planned: Sequence[PlannedRun],
    commit: CommitInfo,
    options: RunOptions,
) -> int:
    """Measure and report every run; if interrupted, print how to resume. Returns the exit code."""
    runs = [planned_run.run for planned_run in planned]
    resume = " and ".join(
        command("run", "--resume", run.uuid[:8], *database_arguments(database)) for run in runs
    )
    with database.session() as session:
        stored = queries.progress(session, run_uuids=[run.uuid for run in runs])
    new = options.pool.repeat * sum(len(planned_run.cases) for planned_run in planned)
    total = max(new, sum(run_progress.open for run_progress in stored))
    try:
        with progress(total, prints_each_result=options.prints_each_result) as advance:
            measure_runs(database, pool, planned, commit, advance, given_options())
    except KeyboardInterrupt:
        for run in runs:
            report(database, run, options)
        return say_interrupted(resume)
    except Exception:
        log.warning("what was measured before is stored, continue with %s", resume)
        raise
    return worst_exit_code(report(database, run, options) for run in runs)


def report(database: Database, run: RunInfo, options: RunOptions) -> int:
    """Print the table, write files, and print where results are stored; returns the exit code."""
    with database.session() as session:
        results = queries.run_results(session, run.uuid)
        missing = queries.missing_cases(session, run.uuid)
        records = list(queries.run_records(session, run.uuid))
        unmeasured = queries.jobs_of(session, run.uuid, states=("no-device",))
    position = {key: i for i, key in enumerate(run.plan)}
    results.sort(key=lambda result: position.get(result.case, len(position)))
    out = options.console
    on_cpu = bool(results) and all(result.backend == "cpu" for result in results)
    are_own = any("." in result.kernel for result in results)  # of a file or package
    # Ratios of times on a CPU say nothing of a GPU.
    print_unbroken(out, results_table(compare_with_baseline(results), with_speedup=not on_cpu))
    if on_cpu:
        what = "" if are_own else "reference implementations, and not fast: "
        say(out, f"no GPU was used: {what}times of this CPU say nothing of a GPU's")
    if options.trace is not None:
        print_unbroken(out, weighted_table(results, options.trace))
    for line in problem_lines(results):
        say(out, line)
    if missing:
        say(out, f"{len(missing)} of {len(run.plan)} planned cases have no result")
    for reason, count in Counter(job.reason for job in unmeasured).most_common():
        say(out, f"no-device: {count} × {reason}")
    say(out, f"stored {len(results)} results of run {run.uuid[:8]} in {database.url}")
    options.files.write(records)
    if options.files.plot is not None:
        drawn = write_plot(results, Path(options.files.plot))
        say(out, f"plot: {options.files.plot}, {drawn} shapes")
    for path in options.files.paths:
        say(out, f"records: {path}")
    show = command("dashboard", *database_arguments(database))
    say(out, f"view them: {show}, then {RESULTS_PAGE}?run={run.uuid[:8]}")
    return int(exit_code_of_run(records, missing))


@contextmanager
def progress(total: int | None, *, prints_each_result: bool = False) -> Iterator[OnRecord]:
    """Show stored results.

    total: expected results; None: unknown. prints_each_result: also print one line per result.
    """
    with shown_progress("measuring", total) as bar:

        def advance(record: Record) -> None:
            log.info(
                "%s: %s %s us",
                record.case,
                record.status,
                record.median_us,
                extra={"run": record.run.uuid},
            )
            bar.advance(case_in_words(record))
            if prints_each_result:
                say(bar.out, result_line(record))

        yield advance
