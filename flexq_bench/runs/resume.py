"""Resume of a run: its missing cases, and checks that they may be measured now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from flexq_bench.db import queries
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.records import CommitInfo, Record, RunInfo
from flexq_bench.errors import UsageError
from flexq_bench.runs.owner_process import is_alive, this_process
from flexq_bench.runs.plan import cases_of_keys
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.models import get_model
from flexq_bench.workloads.suite import Shape
from flexq_bench.workloads.suites import load_suite


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A stored run. cases: those without a result. first: one of its results; None: none."""

    run: RunInfo
    cases: tuple[Case, ...]
    first: Record | None


def read_unfinished(
    database: Database,
    prefix: str,
    suite_name: str | None,
    commit: CommitInfo,
    *,
    repetitions: bool,
) -> Unfinished:
    """Read the run whose uuid begins with the prefix. suite_name None: not checked.

    repetitions: for a cluster, where a case with missing repetitions is missing too. Raises
    NotFoundError, AmbiguousError, and UsageError like check_same_work. Without repetitions it also
    raises UsageError if another process or a fleet is measuring the run, because cases would be
    measured twice.
    """
    with database.session() as session:
        summary = queries.run_by_uuid_prefix(session, prefix)
        run = queries.run_info(session, summary.uuid)
        to_measure = queries.cases_to_measure if repetitions else queries.missing_cases
        missing = to_measure(session, summary.uuid)
        first = next(queries.run_records(session, summary.uuid), None)
        results = queries.run_results(session, summary.uuid)
        if not repetitions:
            _check_not_measured_now(session, summary.uuid)
    check_same_work(summary, suite_name, commit)
    return Unfinished(run, cases_of_keys(missing, _shapes_with_names(run.suite, results)), first)


def _check_not_measured_now(session: Session, run: str) -> None:
    """Raise UsageError if a fleet, or another process on this host, is measuring the run."""
    leased = queries.leased_jobs(session, run)
    if leased:
        raise UsageError(
            f"a fleet measures run {run[:8]} now, its workers hold {leased} jobs: wait for its end "
            "(flexq-bench status), or join it with --cluster"
        )
    owners = {run.uuid: run.owner for run in queries.owned_runs(session)}
    owner = owners.get(run)
    if owner is not None and owner != this_process() and is_alive(owner):
        raise UsageError(
            f"process {owner.pid} on this host measures run {run[:8]} now: wait for its end"
        )


def check_same_work(
    summary: queries.RunSummary, suite_name: str | None, commit: CommitInfo
) -> None:
    """Raise UsageError if a run is of another suite or commit."""
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


def _shapes_with_names(suite_name: str, results: Sequence[queries.ResultRow]) -> Iterator[Shape]:
    """Yield the run's shapes with model and layer names, which stored keys don't contain."""
    for result in results:
        if result.n is not None and result.k is not None:
            yield Shape(result.n, result.k, result.layer, result.model)
    with suppress(WorkloadError):  # a sweep, or a suite file that has moved
        yield from load_suite(suite_name).shapes
    for model in dict.fromkeys(result.model for result in results if result.model):
        with suppress(WorkloadError):
            spec = get_model(model)
            yield from (Shape(s.n, s.k, s.name, model) for s in spec.all_layers())
