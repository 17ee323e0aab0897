"""Going on with an interrupted run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from db import queries
from db.engine import open_database
from db.records import CommitInfo, Record
from db.store import finish_run
from flexq_bench.cli.measuring import NO_CLUSTER, Setup, carry_out, local_executor, report
from flexq_bench.cli.options import BackendChoice
from flexq_bench.errors import UsageError
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs.plan import cases_of_keys
from workloads.errors import WorkloadError
from workloads.models import get_model
from workloads.suite import Shape
from workloads.suites import load_suite


def resume_run(prefix: str, suite_name: str | None, setup: Setup) -> int:
    """Go on with an interrupted run; the exit code.

    Raises UsageError if it is another suite's, or was begun at another commit or on another
    backend: its numbers would not belong together.
    """
    commit = current_commit()
    with open_database(setup.db, create=False) as database:
        with database.session() as session:
            summary = queries.run_by_uuid_prefix(session, prefix)
            run = queries.run_info(session, summary.uuid)
            # Repetitions are a fleet's: this process alone measures what has no result at all.
            alone = setup.cluster == NO_CLUSTER
            to_measure = queries.missing_cases if alone else queries.cases_to_measure
            missing = to_measure(session, summary.uuid)
            first = next(queries.run_records(session, summary.uuid), None)
            results = queries.run_results(session, summary.uuid)
        check_same_work(summary, suite_name, commit)
        cases = cases_of_keys(missing, _named_shapes(run.suite, results))
        if not cases:
            with database.session() as session:
                finish_run(session, run.uuid, "complete")
            return report(database, run, setup)
        setup = _as_before(setup, first)
        if not alone:
            from flexq_bench.cli.fleet_runs import resume_on_fleet

            return resume_on_fleet(database, run, first.gpu if first else None, cases, setup)
        executor = local_executor(setup)
        if first is not None and executor.backend != first.backend:
            raise UsageError(
                f"run {run.uuid[:8]} was begun on the {first.backend} backend: add "
                f"--backend {first.backend}, or start a new run"
            )
        executor.check(cases)
        return carry_out(database, executor, cases, run, commit, setup)


def check_same_work(
    summary: queries.RunSummary, suite_name: str | None, commit: CommitInfo
) -> None:
    """Raise UsageError if a run is of another suite, or was begun at another commit."""
    short = summary.uuid[:8]
    if suite_name is not None and suite_name != summary.suite:
        raise UsageError(f"run {short} is of suite {summary.suite}, not {suite_name}")
    if (summary.commit, summary.dirty) != (commit.sha, commit.dirty):
        raise UsageError(
            f"run {short} was begun at {_name(summary.commit, summary.dirty)} and this is "
            f"{_name(commit.sha, commit.dirty)}: go back to that commit, or start a new run"
        )


def _name(sha: str, dirty: bool) -> str:
    return (sha if sha.startswith("pkg-") else sha[:10]) + (" with changes" if dirty else "")


def _as_before(setup: Setup, first: Record | None) -> Setup:
    """The setup with what the run's records tell: its seed, and its backend where none is asked."""
    if first is None:
        return setup
    backend = setup.backend
    if backend is BackendChoice.AUTO and setup.device is None:
        backend = BackendChoice(first.backend)
    seed = first.seed if setup.seed is None else setup.seed
    return replace(setup, backend=backend, seed=seed)


def _named_shapes(suite_name: str, results: Sequence[queries.ResultRow]) -> Iterator[Shape]:
    """What people call the run's shapes: a stored key doesn't tell."""
    for result in results:
        yield Shape(result.n, result.k, result.layer, result.model)
    with suppress(WorkloadError):  # a sweep, or a suite file that has moved
        yield from load_suite(suite_name).shapes
    for model in dict.fromkeys(result.model for result in results if result.model):
        with suppress(WorkloadError):
            spec = get_model(model)
            yield from (Shape(s.n, s.k, s.name, model) for s in spec.all_layers())
