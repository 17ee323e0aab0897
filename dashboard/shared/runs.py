"""Selection of the runs of a page, and notes on these runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from flexq_bench import accuracy, decode
from flexq_bench.dashboard.database import command_on
from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import as_code, as_text, local_time, short_commit
from flexq_bench.dashboard.shared.project import current_project
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.queries import SCHEDULED, SWEEP, Filters, ResultRow, RunName, RunSummary
from flexq_bench.measure import machine_code as static

# Runs that do not time single kernels: machine code metrics, and whole models.
OTHER_SUITES = (static.SUITE, accuracy.SUITE, decode.SUITE)
_MAX_LISTED_RUNS = 100  # newest runs in the list; older ones can be opened by link
_ANY = ""


@dataclass(frozen=True, slots=True)
class ShownRuns:
    """Runs, newest first. only_on: the run to show for each GPU; None: all results of all runs."""

    runs: tuple[RunSummary, ...]
    only_on: dict[str, RunSummary] | None

    def results(self, database: Database) -> list[ResultRow]:
        """Return the results of these runs, grouped by run."""
        if not self.runs:
            return []
        with database.session() as session:
            results = queries.results_table(session, Filters(runs=tuple(r.uuid for r in self.runs)))
        if self.only_on is None:
            return results
        return [r for r in results if self._is_latest(r)]

    def _is_latest(self, result: ResultRow) -> bool:
        latest = (self.only_on or {}).get(result.gpu)
        return latest is not None and latest.uuid == result.run


def list_runs(database: Database, names: Sequence[str] = ("run",)) -> list[RunName]:
    """Return the newest runs, and those in the URL. names: of the URL's parameters."""
    with database.session() as session:
        recent = queries.run_names(session, without_suites=OTHER_SUITES, limit=_MAX_LISTED_RUNS)
        known = {run.uuid for run in recent}
        for prefix in (text for name in names for text in st.query_params.get_all(name)):
            if any(uuid.startswith(prefix) for uuid in known):
                continue
            try:
                run = queries.run_by_uuid_prefix(session, prefix)
            except NotFoundError:
                continue  # the control shows that it is missing
            recent.append(RunName(run.uuid, run.suite, run.status, run.created_at, run.trigger))
    return recent


def choose_suite(place: DeltaGenerator, controls: Controls, suites: Sequence[str]) -> str:
    """Select a suite; empty: any."""
    return controls.select(
        place, "suite", "Suite", [_ANY, *suites], _ANY, format_func=lambda name: name or "any suite"
    )


def choose_runs(
    place: DeltaGenerator,
    controls: Controls,
    database: Database,
    listed: Sequence[RunName],
    zone: tzinfo,
) -> ShownRuns:
    """Select runs; by default the latest complete run of each GPU."""
    suites = sorted({run.suite for run in listed})
    suite = choose_suite(place, controls, suites)
    by_uuid = {run.uuid: run for run in listed if suite in (_ANY, run.suite)}
    chosen = controls.multiselect(
        place,
        "run",
        "Runs",
        list(by_uuid),
        placeholder="latest scheduled run per GPU",
        format_func=lambda uuid: run_title(by_uuid[uuid], zone),
        to_url=lambda uuid: uuid[:8],
    )
    if chosen:
        ordered = [uuid for uuid in by_uuid if uuid in chosen]
        with database.session() as session:
            return ShownRuns(tuple(queries.runs_by_uuid(session, ordered)), None)
    with database.session() as session:
        latest = default_runs(session, suite=suite or None)
    distinct = {run.uuid: run for run in latest.values()}
    newest_first = sorted(distinct.values(), key=lambda run: run.created_at, reverse=True)
    return ShownRuns(tuple(newest_first), latest)


def default_runs(session: Session, *, suite: str | None) -> dict[str, RunSummary]:
    """Return the newest complete run of each GPU, of the most relevant kind that has any.

    The kinds are, in this order: scheduled runs, other runs than sweeps, sweeps, runs on CPUs.
    """
    on_gpus = {"suite": suite, "backend": "cuda"}
    preferences: tuple[dict[str, Any], ...] = (
        on_gpus | {"trigger": SCHEDULED},
        on_gpus | {"without_triggers": (SWEEP,)},
        on_gpus,
        {"suite": suite, "without_triggers": (SWEEP,)},
        {"suite": suite},
    )
    return first_runs(session, preferences, complete=True)


def first_runs(
    session: Session, preferences: Sequence[Mapping[str, Any]], **filters: Any
) -> dict[str, RunSummary]:
    """Return the newest run of each GPU by the first preferred filters that any run passes.

    Runs of other projects are returned only if the main one has none.
    """
    for project in (current_project(session), None):
        for preferred in preferences:
            runs = queries.latest_runs(
                session, without_suites=OTHER_SUITES, project=project, **filters, **preferred
            )
            if runs:
                return runs
    return {}


def describe_runs(shown: ShownRuns, zone: tzinfo) -> str:
    """Return Markdown with one line per run."""
    return "  \n".join(_facts(run, zone) for run in shown.runs)


def advise(shown: ShownRuns, listed: Sequence[RunName], database: Database) -> list[str]:
    """Return Markdown lines with the problems of these runs, and how to solve them."""
    lines = [_unfinished(run, database) for run in shown.runs if run.missing]
    lines += [
        f"Run {as_code(run.uuid[:8])} failed after all its planned results were stored."
        for run in shown.runs
        if run.status == "failed" and not run.missing
    ]
    if shown.only_on is not None and listed:
        suites = {run.suite for run in shown.runs}
        same_suite = [run for run in listed if run.suite in suites] or list(listed)
        newest = max(same_suite, key=lambda run: run.created_at)
        if all(run.created_at < newest.created_at for run in shown.runs):
            with database.session() as session:
                (summary,) = queries.runs_by_uuid(session, [newest.uuid])
            if summary.missing:
                lines.append(f"There is a newer one. {_unfinished(summary, database)}")
    return lines


def _unfinished(run: RunSummary, database: Database) -> str:
    state = {
        "running": "is still running, or was killed",
        "failed": "failed",
        "interrupted": "was interrupted",
    }.get(run.status, f"is {run.status}")
    return (
        f"Run {as_code(run.uuid[:8])} {state}: {run.missing} of {run.planned} planned cases have "
        f"no result. Resume it: {command_on(database, 'run', '--resume', run.uuid[:8])}"
    )


def run_title(run: RunName, zone: tzinfo) -> str:
    """Return the title of a run in a list."""
    return f"{run.uuid[:8]} · {run.suite} · {local_time(run.created_at, zone)} · {run.status}"


def _facts(run: RunSummary, zone: tzinfo) -> str:
    return " · ".join(
        (
            f"**{as_text(', '.join(run.gpus) or 'no result yet')}**",
            as_text(run.suite),
            f"run {as_code(run.uuid[:8])}",
            f"commit {as_code(short_commit(run.commit, run.dirty))}",
            f"{run.received} results",
            as_text(local_time(run.created_at, zone)),
        )
    )
