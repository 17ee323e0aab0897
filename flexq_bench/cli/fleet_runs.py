"""`run` and `sweep` on a cluster: a run for each kind of GPU, and going on with one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase

from db import queries
from db.engine import Database, open_database
from db.records import CommitInfo, RunInfo
from flexq_bench.cli.measuring import (
    Setup,
    announce,
    asked_backend,
    carry_out_and_report,
    warn_of_skipped,
)
from flexq_bench.errors import UsageError
from flexq_bench.fleet import Fleet, Kind, RayCrew, open_fleet, parse_times
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs.lifecycle import OnRecord, new_run, open_run
from flexq_bench.runs.plan import build_plan
from workloads.case import Case
from workloads.names import unknown
from workloads.suite import Suite


@contextmanager
def fleet_of(database: Database, setup: Setup, commit: CommitInfo) -> Iterator[Fleet]:
    """The fleet that a person asked for. Raises UsageError if the options don't fit together."""
    if setup.device is not None:
        raise UsageError(
            "--device picks a device of this process: leave it out with --cluster, which uses all"
        )
    times = parse_times(setup.fleet.times)
    crew = RayCrew(
        setup.cluster,
        backend=asked_backend(setup),
        seed=setup.seed or 0,
        tuning=setup.tuning,
        times=times,
    )
    with open_fleet(database, crew, commit, times) as fleet:
        yield fleet


def chosen_kinds(fleet: Fleet, setup: Setup) -> tuple[Kind, ...]:
    """The kinds asked for. Raises UsageError for a name or glob that no kind has."""
    asked, kinds = setup.fleet.gpus, fleet.kinds
    for pattern in asked:
        if not any(fnmatchcase(kind.gpu, pattern) for kind in kinds):
            raise UsageError(unknown("GPU", pattern, [kind.gpu for kind in kinds]))
    return tuple(
        kind for kind in kinds if not asked or any(fnmatchcase(kind.gpu, one) for one in asked)
    )


def measure_on_fleet(suite: Suite, asked_kernels: Sequence[str], trigger: str, setup: Setup) -> int:
    """Measure a suite on every kind of GPU of a cluster; the exit code."""
    commit = current_commit()
    with open_database(setup.db) as database, fleet_of(database, setup, commit) as fleet:
        works: list[tuple[RunInfo, str, Sequence[Case]]] = []
        planned = []
        for kind in chosen_kinds(fleet, setup):
            plan = build_plan(suite, kind.backend, kind.capability, asked_kernels=asked_kernels)
            warn_of_skipped(plan)
            run = new_run(plan.suite, trigger, plan.keys)
            works.append((run, kind.gpu, plan.cases))
            planned.append((kind.gpu, kind.workers, plan.cases))
        announce(database, planned, setup)
        return _measure(database, fleet, works, commit, setup, setup.fleet.repeat)


def resume_on_fleet(
    database: Database, run: RunInfo, gpu: str | None, cases: Sequence[Case], setup: Setup
) -> int:
    """Go on with a run on the kind of GPU that it was begun on; the exit code.

    gpu None: it has no result yet, and the cluster's only kind measures it. Raises UsageError if
    the cluster has no such kind.
    """
    commit = current_commit()
    with fleet_of(database, setup, commit) as fleet:
        kinds = [kind.gpu for kind in fleet.kinds]
        if gpu is None and len(kinds) == 1:
            gpu = kinds[0]
        if gpu is None:
            raise UsageError(
                f"run {run.uuid[:8]} has no result that tells its kind of GPU, and this cluster "
                f"has {', '.join(kinds)}: say which with --gpus"
            )
        if gpu not in kinds:
            raise UsageError(
                f"run {run.uuid[:8]} was begun on {gpu}, and this cluster has {', '.join(kinds)}: "
                "join a cluster that has one"
            )
        return _measure(database, fleet, [(run, gpu, cases)], commit, setup, 1)


def _measure(
    database: Database,
    fleet: Fleet,
    planned: Sequence[tuple[RunInfo, str, Sequence[Case]]],
    commit: CommitInfo,
    setup: Setup,
    repeat: int,
) -> int:
    """planned: a run, the SKU that measures it, and the cases without a result."""
    runs = [run for run, _, _ in planned]
    with database.session() as session:
        stored = queries.progress(session, run_uuids=[run.uuid for run in runs])
    total = sum(repeat * len(cases) for _, _, cases in planned)

    def measure(on_record: OnRecord) -> None:
        with ExitStack() as opened:
            works = [
                fleet.declare(
                    opened.enter_context(open_run(database, run, commit)),
                    gpu,
                    cases,
                    repetitions=repeat,
                )
                for run, gpu, cases in planned
            ]
            fleet.measure(works, on_record)

    return carry_out_and_report(
        database, runs, max(total, sum(one.open for one in stored)), measure, setup
    )
