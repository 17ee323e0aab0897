"""Runs of a suite on a pool, one per kind of device: planned first, then measured together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from flexq_bench.db.engine import Database
from flexq_bench.db.records import CommitInfo, RunInfo
from flexq_bench.fleet.pool import Kind, Pool, Work
from flexq_bench.runs.lifecycle import OnRecord, new_run, open_run
from flexq_bench.runs.plan import build_plan
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.suite import Suite

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that has not begun. cases: those without a result."""

    run: RunInfo
    kind: Kind
    cases: tuple[Case, ...]


def plan_runs(
    pool: Pool, suite: Suite, requested_kernels: Sequence[str], trigger: str
) -> list[PlannedRun]:
    """A new run of the suite for each kind of device.

    Raises UsageError as build_plan, MeasureError as Pool.check.
    """
    planned = []
    for kind in pool.kinds:
        plan = build_plan(suite, kind.backend, kind.capability, requested_kernels=requested_kernels)
        if plan.skipped:
            log.warning("the %s backend has no %s", plan.backend, ", ".join(plan.skipped))
        pool.check(plan.cases)
        planned.append(PlannedRun(new_run(plan.suite, trigger, plan.keys), kind, plan.cases))
    return planned


def measure_runs(
    database: Database,
    pool: Pool,
    planned: Sequence[PlannedRun],
    commit: CommitInfo,
    on_record: OnRecord,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Open the runs, measure their cases, and store their final status. Raises as Pool.measure.

    options: see begin_run.
    """
    with ExitStack() as opened:
        works = [
            Work(
                opened.enter_context(open_run(database, run.run, commit, options)),
                run.kind.gpu,
                run.cases,
            )
            for run in planned
        ]
        pool.measure(works, on_record)
