"""What `run` and `sweep` have in common: from a suite to stored results and their table."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from db import queries
from db.engine import Database, open_database
from db.records import CommitInfo, Record, RunInfo
from flexq_bench.cli.options import BackendChoice
from flexq_bench.cli.output import console, say, show_whole
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import INTERRUPTED
from flexq_bench.measure import Tuning
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs import command_lines as invocation
from flexq_bench.runs.cost_estimate import read_costs
from flexq_bench.runs.executor import LocalExecutor
from flexq_bench.runs.lifecycle import (
    OnRecord,
    new_run,
    open_run,
    store_outcomes,
    verdict_of_run,
    worst,
)
from flexq_bench.runs.plan import Plan, build_plan
from flexq_bench.runs.published_numbers import keep_references
from flexq_bench.runs.result_files import ResultFiles
from flexq_bench.runs.sweep_plot import write_plot
from flexq_bench.runs.table import problem_lines, published_table, result_line, results_table
from flexq_bench.stats.baseline import compare_with_baseline
from kernels.contract import Backend
from workloads.case import Case
from workloads.published import published_speedups
from workloads.suite import Suite

NO_CLUSTER = "none"
RESULTS_PAGE = "http://localhost:8501/results"  # of a dashboard with the default port

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """What only a cluster has. gpus: SKUs or globs; empty: every kind there is.

    repeat: how often each case is measured, on different GPUs of its kind where there are several.
    times: as `--times` has it; None: the defaults.
    """

    gpus: tuple[str, ...] = ()
    repeat: int = 1
    times: str | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """Where to measure, where to store, and what to write beside.

    seed None: of the run, or 0. streams: say how long it will take, and each result as it comes.
    """

    db: str | None
    cluster: str = NO_CLUSTER
    fleet: FleetSetup = field(default_factory=FleetSetup)
    backend: BackendChoice = BackendChoice.AUTO
    device: str | None = None
    seed: int | None = None
    tuning: Tuning = Tuning.REMEMBERED
    files: ResultFiles = field(default_factory=ResultFiles)
    streams: bool = False

    @property
    def people(self) -> Console:
        """Where the table goes."""
        return console(stderr=self.files.uses_stdout)


def measure_suite(suite: Suite, asked_kernels: Sequence[str], trigger: str, setup: Setup) -> int:
    """Measure a suite as a new run, on a cluster one for each kind of GPU; the exit code."""
    if setup.cluster != NO_CLUSTER:
        from flexq_bench.cli.fleet_runs import measure_on_fleet

        return measure_on_fleet(suite, asked_kernels, trigger, setup)
    with open_database(setup.db) as database:
        keep_references(database)
        executor = local_executor(setup)
        plan = build_plan(suite, executor.backend, executor.capability, asked_kernels=asked_kernels)
        warn_of_skipped(plan)
        executor.check(plan.cases)
        run = new_run(plan.suite, trigger, plan.keys)
        announce(database, [(executor.gpu, 1, plan.cases)], setup)
        return carry_out(database, executor, plan.cases, run, current_commit(), setup)


def announce(
    database: Database, works: Sequence[tuple[str, int, Sequence[Case]]], setup: Setup
) -> None:
    """Say how much there is to measure, and how long it takes if anything like it was measured.

    works: SKU, how many of it, and the cases for it.
    """
    if not setup.streams:
        return
    for gpu, devices, cases in works:
        with database.session() as session:
            seconds = read_costs(session, gpu).total(cases)
        known = "nothing like it was measured before"
        took = known if seconds is None else f"about {seconds / devices:.0f} s"
        say(setup.people, f"{len(cases)} cases on {devices} × {gpu}: {took}")


def warn_of_skipped(plan: Plan) -> None:
    if plan.skipped:
        log.warning("the %s backend has no %s", plan.backend, ", ".join(plan.skipped))


def asked_backend(setup: Setup) -> Backend | None:
    """None: the best there is."""
    if setup.backend is BackendChoice.AUTO:
        return None
    return "cuda" if setup.backend is BackendChoice.CUDA else "cpu"


def local_executor(setup: Setup) -> LocalExecutor:
    """This process on the device asked for. Raises UsageError if the options don't fit together."""
    if setup.fleet.gpus or setup.fleet.repeat > 1:
        raise UsageError(
            "--gpus and --repeat are for a cluster: add --cluster local, or leave them out"
        )
    device = device_name(asked_backend(setup), setup.device)
    return LocalExecutor(device, seed=setup.seed or 0, tuning=setup.tuning)


def device_name(asked: Backend | None, device: str | None) -> str:
    """The device asked for, else the backend's first, else the best there is."""
    if device is not None:
        if asked is not None and not device.startswith(asked):
            raise UsageError(f"--device {device} is not of --backend {asked}: drop one of them")
        return device
    if asked is not None:
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def carry_out(
    database: Database,
    executor: LocalExecutor,
    cases: Sequence[Case],
    run: RunInfo,
    commit: CommitInfo,
    setup: Setup,
) -> int:
    """Execute in this process, report, and say how to go on if it was stopped; the exit code."""

    def measure(on_record: OnRecord) -> None:
        with open_run(database, run, commit) as opened:
            store_outcomes(opened, cases, executor.execute(cases), on_record=on_record)

    return carry_out_and_report(database, [run], len(cases), measure, setup)


def carry_out_and_report(
    database: Database,
    runs: Sequence[RunInfo],
    total: int,
    measure: Callable[[OnRecord], None],
    setup: Setup,
) -> int:
    """Measure, report every run, and say how to go on if it was stopped; the worst exit code.

    total: results that are to come. measure: stores each and then tells of it.
    """
    resume = " and ".join(
        invocation.command(
            "run", "--resume", run.uuid[:8], *invocation.database_arguments(database)
        )
        for run in runs
    )
    try:
        with progress(total, streams=setup.streams) as advance:
            measure(advance)
    except KeyboardInterrupt:
        for run in runs:
            report(database, run, setup)
        say(
            console(stderr=True),
            f"interrupted: what was measured is stored, go on with {resume}",
        )
        return INTERRUPTED
    except Exception:
        log.warning("what was measured before is stored, go on with %s", resume)
        raise
    return worst(report(database, run, setup) for run in runs)


def report(database: Database, run: RunInfo, setup: Setup) -> int:
    """Print the table, write the files, and say where everything is; the exit code."""
    with database.session() as session:
        results = queries.run_results(session, run.uuid)
        missing = queries.missing_cases(session, run.uuid)
        records = list(queries.run_records(session, run.uuid))
        unmeasured = queries.jobs_of(session, run.uuid, states=("no-device",))
    position = {key: i for i, key in enumerate(run.plan)}
    results.sort(key=lambda result: position.get(result.case, len(position)))
    out = setup.people
    show_whole(out, results_table(compare_with_baseline(results)))
    published = published_table(results, published_speedups(run.suite))
    if published is not None:
        show_whole(out, published)
    for line in problem_lines(results):
        say(out, line)
    if missing:
        say(out, f"{len(missing)} of {len(run.plan)} planned cases have no result")
    for reason, count in Counter(job.reason for job in unmeasured).most_common():
        say(out, f"no-device: {count} × {reason}")
    say(out, f"stored {len(results)} results of run {run.uuid[:8]} in {database.url}")
    setup.files.write(records)
    if setup.files.plot is not None:
        drawn = write_plot(results, Path(setup.files.plot))
        say(out, f"plot: {setup.files.plot}, {drawn} shapes")
    for path in setup.files.paths:
        say(out, f"records: {path}")
    show = invocation.command("dashboard", *invocation.database_arguments(database))
    say(out, f"look at them: {show}, then {RESULTS_PAGE}?run={run.uuid[:8]}")
    return int(verdict_of_run(records, missing))


@contextmanager
def progress(total: int | None, *, streams: bool = False) -> Iterator[OnRecord]:
    """A bar on stderr where a person looks at it, else a log line a result.

    total: results that are to come; None: nobody knows yet. streams: a line a result in any case.
    """
    err = console(stderr=True)
    done = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    name = TextColumn("{task.description}")
    with Progress(name, *done, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("measuring", total=total)

        def advance(record: Record) -> None:
            log.info(
                "%s: %s %s us",
                record.case,
                record.status,
                record.median_us,
                extra={"run": record.run.uuid},
            )
            bar.update(task, advance=1, description=record.case)
            if streams:
                say(bar.console, result_line(record))

        yield advance
