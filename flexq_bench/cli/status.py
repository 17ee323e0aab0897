"""`flexq-bench status`: state of runs, nights, workers and requests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from flexq_bench.cli.options import DbOption, JsonFlag
from flexq_bench.cli.output import print_json, printable
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, Session, open_database
from flexq_bench.db.errors import UNAVAILABLE
from flexq_bench.db.queries import Progress, RunSummary, WorkerRow
from flexq_bench.db.requests import OPEN_REQUEST_STATES, cancel_request
from flexq_bench.errors import UsageError
from flexq_bench.runs.command_lines import command, database_arguments, user_name

_MAX_ROWS = 20  # of each list
_MAX_SILENCE_S = 120.0


def status(
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics in Prometheus' text format.")
    ] = False,
    cancel: Annotated[
        str | None,
        typer.Option(
            metavar="REQUEST",
            help="First cancel a request (a prefix of its uuid); its results are kept.",
        ),
    ] = None,
    reap: Annotated[
        bool,
        typer.Option("--reap", help="Mark runs of killed processes of this host as interrupted."),
    ] = False,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show unfinished runs, nightly runs, workers and requests of the database.

    Stalled ones come first, with the reason. Interrupted runs are shown with the command that
    resumes them.
    --prometheus: for the text collector of a node exporter, or whatever serves a file.
    """
    from flexq_bench.fleet.watchdog import stalls
    from flexq_bench.runs.dead_runs import end_dead_runs

    if prometheus and as_json:
        raise UsageError("--prometheus and --json are two formats: leave one of them out")
    if cancel is not None:
        with open_database(db, create=False) as database, database.session() as session:
            request = queries.request_by_uuid_prefix(session, cancel)
            cancel_request(session, request.uuid, person=user_name(), at=datetime.now(UTC))
    if reap:
        with open_database(db, create=False) as database:
            end_dead_runs(database)
    if prometheus:
        typer.echo(_metrics(db), nl=False)
        return
    with open_database(db, read_only=True) as database, database.session() as session:
        sections = _read(session)
        sections["stopped"] = _stopped(database, session)
        dead = {row.run for row in sections["stopped"]}
        sections["runs"] = [row for row in sections["runs"] if row.run not in dead]
        sections["stalls"] = list(stalls(session))
    if as_json:
        print_json({name: [_as_data(row) for row in rows] for name, rows in sections.items()})
    else:
        for line in _lines(sections):
            typer.echo(printable(line))


def _metrics(db: str | None) -> str:
    """The metrics; if the database is unavailable, print that metric and raise."""
    from flexq_bench.fleet.prometheus import OUTAGE, prometheus_text

    try:
        with open_database(db, read_only=True) as database, database.session() as session:
            return prometheus_text(session)
    except UNAVAILABLE:
        typer.echo(OUTAGE, nl=False)
        raise


@dataclass(frozen=True, slots=True)
class Stopped:
    """An unfinished run that is not running. reason: of its end. resume: a command line."""

    run: str
    suite: str
    reason: str
    missing: int
    resume: str


def _stopped(database: Database, session: Session) -> list[Stopped]:
    """The newest unfinished runs that are not running."""
    from flexq_bench.runs.dead_runs import dead_runs

    reasons = {
        run.uuid: f"its process {run.owner.pid} on {run.owner.host} is dead (--reap ends the run)"
        for run in dead_runs(database)
        if run.owner is not None
    }
    runs = [queries.run_by_uuid_prefix(session, uuid) for uuid in reasons]
    for status in ("interrupted", "failed"):
        runs += queries.runs(session, status=status, limit=_MAX_ROWS)
    runs = [run for run in runs if run.missing or run.uuid in reasons]
    runs.sort(key=lambda run: run.created_at, reverse=True)
    return [
        Stopped(
            run.uuid,
            run.suite,
            reasons.get(run.uuid, run.status),
            run.missing,
            _resume(database, run),
        )
        for run in runs[:_MAX_ROWS]
    ]


def _resume(database: Database, run: RunSummary) -> str:
    from flexq_bench.accuracy import SUITE as ACCURACY
    from flexq_bench.decode import SUITE as DECODE

    if run.suite in (ACCURACY, DECODE):  # their runs don't store all options
        return f"the same flexq-bench {run.suite} command with --resume {run.uuid[:8]}"
    verb = "nightly" if run.trigger == "nightly" else "run"
    return command(verb, "--resume", run.uuid[:8], *database_arguments(database))


def _read(session: Session) -> dict[str, list[Any]]:
    nights = {n.key: n for n in queries.night_states(session, limit=_MAX_ROWS)}
    nights |= {n.key: n for n in queries.unfinished_nights(session)}
    comparisons = queries.comparison_states(session, [n.run for n in nights.values()])
    return {
        "runs": queries.progress(session, limit=_MAX_ROWS),
        "nights": [_Night(n, comparisons.get(n.run, {})) for n in nights.values()],
        "workers": queries.workers(session, live=True),
        "requests": queries.requests(session, states=OPEN_REQUEST_STATES, limit=_MAX_ROWS),
    }


@dataclass(frozen=True, slots=True)
class _Night:
    """A nightly run. comparisons: number of its jobs that compare, by state."""

    night: queries.NightState
    comparisons: dict[str, int]

    @property
    def line(self) -> str:
        night = self.night
        outcome = f" ({night.report['outcome']})" if "outcome" in night.report else ""
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.comparisons.items()))
        jobs = f", comparisons: {states}" if states else ""
        return (
            f"night {night.name} {night.suite} on {night.gpu}: {night.state}{outcome}{jobs}, "
            f"run {night.run[:8]}"
        )


def _as_data(row: Any) -> dict[str, Any]:
    """The JSON output of a row."""
    if isinstance(row, _Night):
        return asdict(row.night) | {"comparisons": row.comparisons}
    return asdict(row) | _computed_fields(row)


def _computed_fields(row: Any) -> dict[str, Any]:
    """Values of the JSON output that are computed from a row and the current time."""

    if isinstance(row, WorkerRow):
        return {"silent_s": _silent_s(row)}
    if isinstance(row, Progress):
        return {"open": row.open, "total": row.total}
    return {}


def _lines(sections: dict[str, list[Any]]) -> list[str]:
    runs = [_run_line(row) for row in sections["runs"]]
    nights = [row.line for row in sections["nights"]]
    workers = [_worker_line(row) for row in sections["workers"]]
    requests = [
        f"request {row.uuid[:8]} of {row.requester}: {row.state}, {row.cases} cases"
        + (f", about {row.expected_s:.0f} s" if row.expected_s else "")
        for row in sections["requests"]
    ]
    stopped = [
        f"run {row.run[:8]} {row.suite}: {row.reason}, {row.missing} cases have no result; "
        f"continue with: {row.resume}"
        for row in sections["stopped"]
    ]
    stalled = [row.line for row in sections["stalls"]]
    return [*stalled, *runs, *stopped, *nights, *workers, *requests] or [
        "nothing runs and nothing waits"
    ]


def _run_line(row: Progress) -> str:
    states = ", ".join(f"{count} {state}" for state, count in sorted(row.states.items()))
    remaining = f", about {row.expected_s:.0f} GPU seconds remaining" if row.expected_s else ""
    return (
        f"run {row.run[:8]} {row.suite} ({row.trigger}) at {row.commit[:10]}: {row.status}, "
        f"{states}{remaining}"
    )


def _worker_line(row: WorkerRow) -> str:
    what = row.case_key or "idle"
    warm = f", {row.temperature_c:.0f} °C" if row.temperature_c is not None else ""
    silent = _silent_s(row)
    note = f", silent for {silent:.0f} s" if silent > _MAX_SILENCE_S else ""
    return (
        f"worker {row.uuid[:8]} on {row.host}, {row.gpu}: {what}, {row.finished} done{warm}{note}"
    )


def _silent_s(row: WorkerRow) -> float:
    return max(0.0, (datetime.now(UTC) - row.heartbeat_at).total_seconds())
