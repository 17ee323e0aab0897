"""`flexq-bench nightly`: measure the newest commit, compare, fill gaps, report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexq_bench.cli.external import (
    HistorySourceOptions,
    OpenedProject,
    code_with_failures,
    with_external,
)
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import (
    MAX_COUNT,
    DbOption,
    JsonFlag,
    PlaceOptions,
    SeedOption,
    TuningOptions,
    commits_option,
)
from flexq_bench.cli.output import console, print_json, say, say_interrupted
from flexq_bench.cli.stored_options import (
    NIGHTLY,
    arguments_of,
    given_options,
    stores_options,
)
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.releases import store_releases
from flexq_bench.db.urls import ENVIRONMENT_VARIABLE
from flexq_bench.errors import (
    UsageError,
    one_line,
)
from flexq_bench.exit_codes import ExitCode, worst_exit_code
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.repository.git import commits_of_tags
from flexq_bench.repository.provenance import current_commit
from flexq_bench.repository.worktrees import find_revision, is_shallow, repository_of
from flexq_bench.runs.command_lines import command, database_arguments
from flexq_bench.runs.result_files import make_folder
from flexq_bench.workloads.suite import Suite

if TYPE_CHECKING:
    from flexq_bench.ci.backfill import CommitResult
    from flexq_bench.ci.nightly import Rules
    from flexq_bench.ci.report_data import KindReport
    from flexq_bench.db.records import Record
    from flexq_bench.fleet import PoolOptions
    from flexq_bench.fleet.pool import OnCompared
    from flexq_bench.repository.project import Project
    from flexq_bench.runs.lifecycle import OnRecord


_UUID_PREFIX = re.compile(r"[0-9a-f][0-9a-f-]{5,35}")
_PLACE = ("cluster", "backend", "device", "times", "seed")  # options that gaps are filled with


@dataclass(frozen=True)
class NightOptions:
    """Steps of a nightly run besides measuring."""

    backfill: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_COUNT,
            metavar="CASES",
            help="Maximum number of missing cases of earlier nightly runs to measure.",
        ),
    ] = 500
    canaries: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_COUNT,
            help="Number of series per kind of GPU that are compared with themselves.",
        ),
    ] = 2
    comparisons: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="CASES",
            help="Maximum number of outliers per kind of GPU to compare with an earlier commit.",
        ),
    ] = 50
    alert: Annotated[bool, typer.Option("--alert/--no-alert", help="Open and close alerts.")] = True
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for reports in Markdown, JUnit XML and JSON; it is created if necessary.",
        ),
    ] = None


@dataclass(frozen=True)
class HistoryOptions:
    """Earlier commits of a project to measure instead of the newest one."""

    commits: Annotated[
        str | None,
        commits_option(
            metavar="A..B",
            help="With --project: measure the commits after A up to B instead, B first, then those "
            "that halve the largest gaps; then compare the commits around changes.",
        ),
    ] = None
    every: Annotated[
        int,
        commits_option(min=1, max=MAX_COUNT, metavar="N", help="Only every Nth of them."),
    ] = 1


def _run_to_resume(values: dict[str, Any]) -> str | None:
    """Return the run of the night to resume, and set its name; None: there is none.

    The argument SUITE may be the uuid of the run, or a prefix of it.
    """
    named = values["suite"]
    if not values["resume"]:
        return None
    with open_database(values["db"]) as database, database.session() as session:
        if named is not None and _UUID_PREFIX.fullmatch(named):
            run = queries.run_by_uuid_prefix(session, named).uuid
            nights = [night for night in queries.night_states(session) if night.run == run]
            if not nights:
                raise UsageError(f"run {named} is of no night: flexq-bench run --resume {named}")
            values |= {"suite": None, "night": nights[0].name}
        else:
            unfinished = queries.unfinished_nights(session)
            nights = [night for night in unfinished if named in (None, night.suite)]
    return nights[0].run if nights else None


@stores_options(_run_to_resume, NIGHTLY)
@takes_option_groups
def nightly(
    *,
    suite: Annotated[
        str | None,
        typer.Argument(
            help="A suite's name or .toml file; with --resume also a run of the night to resume. "
            "Default: nightly, or the project's."
        ),
    ] = None,
    night: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the nightly run. Default: today's date, UTC."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume a nightly run with its options: the latest unfinished one.",
        ),
    ] = False,
    rejudge: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Judge the stored comparisons of this nightly run again, by today's rules.",
        ),
    ] = None,
    place: PlaceOptions,
    options: NightOptions,
    sources: HistorySourceOptions,
    history: HistoryOptions,
    seed: SeedOption = 0,
    tuning: TuningOptions,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this commit on every kind of GPU, compare outliers with earlier commits, report.

    Started again on the same day at the same commit, it resumes the nightly run, or does nothing
    if that is done. Earlier nightly runs with missing results are then completed at their own
    commits, newest first.

    Exit code 0: none of the following; 1: a new alert (with --no-alert a regression) or a wrong
    kernel; 4: planned results or comparisons are missing, or a kind of GPU is absent or refused;
    5: a case failed; 130: interrupted (see --resume).
    """
    from flexq_bench.ci.nightly import Rules, rejudge_night

    if options.report is not None:
        make_folder("--report", options.report)
    if rejudge is not None:
        with open_database(db) as database:
            reports = rejudge_night(database, rejudge, alerting=options.alert)
        _show(reports, as_json, options.report)
        raise typer.Exit(int(exit_code(reports, alerting=options.alert)))
    sources.use_kernels()
    if history.commits is not None:
        if sources.project is None or resume or night is not None:
            raise UsageError(
                "--commits needs --project DIR, and no --resume or --night: repeat it to go on"
            )
        code = _measure_history(
            history, sources, suite, place, seed, tuning, db, options, as_json=as_json
        )
        raise typer.Exit(code)
    today = f"{datetime.now(UTC):%F}"
    measured = _measured_code(suite, sources, db, night or today, place)
    pool_options = place.pool(
        seed,
        tuning,
        None if measured.opened is None else measured.opened.measured,
        repeat=place.repeat,
    )
    suite_name, commit = measured.suite.name, measured.commit
    with open_database(db) as database, ended_by_terminate():
        name = unfinished_night(database, suite_name, commit, night) if resume else night or today
        rules = Rules(
            name,
            measured.repository,
            options.canaries,
            options.comparisons,
            alerting=options.alert,
            options=given_options(NIGHTLY),
        )
        try:
            reports = _measure(database, pool_options, measured, rules, db, options.backfill)
            _judge_and_notify(database, name, suite_name, commit, reports, alerting=options.alert)
        except KeyboardInterrupt:
            run = _run_of(database, name, suite_name, commit)
            same: tuple[str, ...] = () if suite is None else (suite,)
            given = given_options([option for option in NIGHTLY if option != "suite"])
            anew = (*same, "--night", name, *arguments_of(given, given))
            again = anew if run is None else ("--resume", run)
            say_interrupted(command("nightly", *again, *database_arguments(database)))
            raise
        except Exception as error:
            _notify_broken_night(database, name, suite_name, commit, error)
            raise
        _show(reports, as_json, options.report)
    raise typer.Exit(code_with_failures(exit_code(reports, alerting=options.alert)))


@dataclass(frozen=True, slots=True)
class _MeasuredCode:
    """A commit and the suite it is measured on.

    opened None: it is of this repository. repository None: its clone is not there.
    """

    suite: Suite
    commit: CommitInfo
    repository: Path | None
    opened: OpenedProject | None = None


def _measured_code(
    suite: str | None,
    sources: HistorySourceOptions,
    db: str | None,
    night: str,
    place: PlaceOptions,
) -> _MeasuredCode:
    """Load the suite and the kernels of a night; a commit that fails to load is notified."""
    from flexq_bench.workloads.suites import load_suite

    project = sources.project
    if project is None:
        own = with_external(load_suite("nightly" if suite is None else suite), None)
        return _MeasuredCode(own, current_commit(), _repository())
    try:
        opened = sources.open_project(builds=place.is_local)
        projects_suite = opened.suite() if suite is None else None
    except UsageError:
        raise
    except Exception as error:
        _notify_commit_without_night(db, night, project, error)
        raise
    selected = projects_suite or opened.suite(suite)
    return _MeasuredCode(selected, opened.revision.commit, opened.project.root, opened)


def _measure_history(
    history: HistoryOptions,
    sources: HistorySourceOptions,
    suite: str | None,
    place: PlaceOptions,
    seed: int,
    tuning: TuningOptions,
    db: str | None,
    options: NightOptions,
    *,
    as_json: bool,
) -> int:
    """Measure earlier commits of a project, and judge changes; returns the exit code."""
    from flexq_bench.ci.backfill import OpenedCommit, history_commits, measure_history
    from flexq_bench.cli.measuring import progress
    from flexq_bench.fleet import open_pool

    assert history.commits is not None
    assert sources.project is not None
    folder = repository_of(Path(sources.project))
    commits = history_commits(folder, history.commits, history.every)
    if not commits:
        raise UsageError(f"--commits {history.commits}: there is no commit in this range")
    opened = sources.open_project(commits[-1], builds=place.is_local)
    selected, project = opened.suite(suite), opened.project
    out = console(stderr=as_json)
    with open_database(db) as database, ended_by_terminate():
        with database.session() as session:
            known = queries.measured_commits(session, selected.name, project=project.name)
        n_measured = sum(sha in known for sha in commits)
        say(out, f"{len(commits)} commits of {project.name}, {n_measured} of them measured already")

        @contextmanager
        def opened_at(sha: str) -> Iterator[OpenedCommit]:
            opened = sources.open_project(sha, builds=place.is_local)
            pool_options = place.pool(seed, tuning, opened.measured, repeat=place.repeat)
            with open_pool(database, pool_options, opened.revision.commit) as pool:
                opened.check_loaded()
                yield OpenedCommit(pool, opened.suite(suite), opened.revision.commit)

        def show(result: CommitResult) -> None:
            detail = f": {result.detail}" if result.detail else ""
            done = f"{result.received} of {result.planned} results{detail}"
            say(out, f"{result.commit[:10]}: {done}")

        try:
            measured = measure_history(
                *(database, folder, commits, known, opened_at, given_options(NIGHTLY)),
                budget=options.comparisons,
                alerting=options.alert,
                progress=progress,
                on_result=show,
                on_measured=lambda: _store_release_tags(database, folder, project.name),
            )
        except KeyboardInterrupt:
            say_interrupted("the same command")
            raise
    results, confirmed = measured.results, measured.confirmed
    incomplete = [result for result in results if result.detail or result.received < result.planned]
    if as_json:
        print_json(
            {
                "project": project.name,
                "suite": selected.name,
                "commits": len(commits),
                "measured_before": n_measured,
                "change_points": measured.changes,
                "verdicts": confirmed.verdicts,
                "opened": confirmed.opened,
                "obstacles": confirmed.obstacles,
                "results": [asdict(result) for result in results],
            }
        )
    else:
        n_complete = len(results) - len(incomplete)
        counts = f"{measured.changes} change points found, {confirmed.verdicts} compared"
        for line in (*confirmed.obstacles, f"{n_complete} commits measured, {counts}"):
            say(out, line)
        for number in confirmed.opened:
            say(out, f"opened alert {number}: {command('explain', str(number))}")
    codes = [ExitCode.REGRESSION] if confirmed.opened else []
    codes += [ExitCode.MISSING] if incomplete or confirmed.obstacles else []
    return code_with_failures(ExitCode(worst_exit_code(codes)))


def _measure(
    database: Database,
    pool_options: PoolOptions,
    measured: _MeasuredCode,
    rules: Rules,
    db: str | None,
    backfill: int,
) -> list[KindReport]:
    """Measure the night and compare its outliers on each kind of GPU, then fill earlier gaps."""
    from flexq_bench.ci.nightly import conclude_nights, measure_night
    from flexq_bench.fleet import open_pool

    suite, commit = measured.suite, measured.commit
    if measured.opened is not None:
        _warn_of_another_repository(database, suite.name, measured.opened.project)
    with open_pool(database, pool_options, commit) as pool:
        if measured.opened is not None:
            measured.opened.check_loaded()
        gpus = [kind.gpu for kind in pool.kinds]
        nights = measure_night(
            database,
            pool,
            suite,
            commit,
            rules,
            progress=partial(_measuring_progress, database, rules, suite.name),
        )
        _store_release_tags(database, rules.repository, commit.project)
        reports = conclude_nights(
            database, pool, nights, commit, rules, progress=_comparing_progress
        )
    if measured.opened is None:  # gaps of projects are filled by nights at their commits
        _backfill(database, pool_options, db, suite.name, gpus, rules, backfill)
    return reports


@contextmanager
def _measuring_progress(
    database: Database, rules: Rules, suite: str, total: int
) -> Iterator[OnRecord]:
    """Show stored results, and notify of a wrong one at once: the night may take hours."""
    from flexq_bench.ci.notifications import events
    from flexq_bench.cli.measuring import progress
    from flexq_bench.cli.notify import send_if_subscribed

    with progress(total) as advance:

        def on_record(record: Record) -> None:
            advance(record)
            if record.status != "incorrect" or not rules.alerting:
                return
            with database.session() as session:
                is_first = events.add_wrong_result_event(session, rules.night, suite, record)
            if is_first:
                send_if_subscribed(database)

        yield on_record


@contextmanager
def _comparing_progress(jobs: int) -> Iterator[OnCompared]:
    from flexq_bench.cli.progress import progress

    with progress("comparing", jobs) as bar:
        yield lambda job: bar.advance("comparing")


def _judge_and_notify(
    database: Database,
    night: str,
    suite: str,
    commit: CommitInfo,
    reports: Sequence[KindReport],
    *,
    alerting: bool,
) -> None:
    """Judge histories of other projects, and create and send the night's notifications."""
    from flexq_bench.ci.history_alerts import judge_histories
    from flexq_bench.ci.notifications import events
    from flexq_bench.cli.external import failures_to_load
    from flexq_bench.cli.notify import send_if_subscribed

    with database.session() as session:
        verdicts = judge_histories(session, alerting=alerting)
        unloaded = failures_to_load()
        if unloaded:
            events.add_unloaded_kernels_event(session, night, suite, commit.sha, unloaded)
        if alerting:
            events.add_history_events(session, verdicts)
            events.add_digest_event(session, night, suite, reports)
    send_if_subscribed(database)


def _notify_broken_night(
    database: Database,
    night: str,
    suite: str,
    commit: CommitInfo,
    error: Exception,
    *,
    todo: str = "resume with: flexq-bench nightly --resume",
) -> None:
    """Notify that the night failed. Errors of the database are ignored, not to hide the cause."""
    from flexq_bench.ci.notifications import events
    from flexq_bench.cli.notify import send_if_subscribed

    with suppress(DatabaseError):
        with database.session() as session:
            lines = [one_line(error), todo]
            events.add_broken_night_event(
                session, night, suite, commit.sha, lines, at=datetime.now(UTC)
            )
        send_if_subscribed(database)


def _warn_of_another_repository(database: Database, suite: str, project: Project) -> None:
    """Warn if the project's last night was at a commit that its repository does not have."""

    with database.session() as session:
        nights = queries.night_states(session, suite=suite, limit=1)
    for night in nights:
        if find_revision(project.root, night.commit) is None and not is_shallow(project.root):
            say(
                console(stderr=True),
                f"night {night.name} of project {project.name} was at {night.commit[:10]}, which "
                f"{project.root} does not have: if that is another project, give this one another "
                "name in flexq-bench.toml, as their results would mix",
            )


def _notify_commit_without_night(db: str | None, night: str, folder: str, error: Exception) -> None:
    """Notify that a project's commit can't be measured.

    It does not build, its file or suite is invalid, or none of its kernels loads.
    """
    from flexq_bench.repository.project import broken_commit

    commit = broken_commit(folder)
    todo = "repair the commit: the next night measures it"
    with suppress(DatabaseError), open_database(db) as database:
        _notify_broken_night(database, night, commit.project, commit, error, todo=todo)


def _store_release_tags(database: Database, repository: Path | None, project: str) -> None:
    """Store the release tags, as results are also compared with the last release."""

    if repository is not None:
        with database.session() as session:
            store_releases(session, commits_of_tags(repository), project=project)


def _run_of(database: Database, name: str, suite: str, commit: CommitInfo) -> str | None:
    """Return a run of a night, abbreviated; None: it has none yet."""
    with database.session() as session:
        nights = queries.night_states(session, name=name, suite=suite, project=commit.project)
    runs = [night.run[:8] for night in nights if night.commit == commit.sha]
    return next(iter(runs), None)


def unfinished_night(
    database: Database, suite: str, commit: CommitInfo, name: str | None = None
) -> str:
    """Name of the latest unfinished night of a suite at this commit, or with this name.

    Raises UsageError if there is none; the message names the commit of another unfinished night.
    """

    with database.session() as session:
        nights = queries.night_states(session, suite=suite, name=name)
        unfinished = [n for n in nights if name is not None or n.state != "done"]
    for night in unfinished:
        if (night.commit, night.dirty) == (commit.sha, commit.dirty):
            return night.name
    if not unfinished:
        raise UsageError(f"no night of suite {suite} is unfinished: start one without --resume")
    raise UsageError(
        f"night {unfinished[0].name} of suite {suite} was begun at {unfinished[0].commit[:10]}: "
        "go back to that commit, or measure this one without --resume"
    )


def _repository() -> Path | None:

    try:
        return repository_of(Path(__file__).resolve().parent)
    except UsageError:
        return None


def _backfill(
    database: Database,
    pool: PoolOptions,
    db: str | None,
    suite: str,
    gpus: Sequence[str],
    rules: Rules,
    cases: int,
) -> None:
    """Fill gaps. The pool must be closed: processes at each gap's commit open their own."""
    from flexq_bench.ci.backfill import fill_gap, find_gaps, resume_in

    if rules.repository is None or not cases:
        return
    options = arguments_of({"cluster": pool.cluster, **given_options()}, _PLACE)
    # In the environment, because all users of the host can read a process' arguments.
    environment = {}
    if db is not None:
        environment[ENVIRONMENT_VARIABLE] = db if "://" in db else str(Path(db).absolute())
    for gap in find_gaps(database, suite, gpus, night=rules.night, cases=cases):
        filled = fill_gap(
            database, gap, rules.repository, options, resume=partial(resume_in, environment)
        )
        count = gap.missing - filled.remaining
        reason = f": {filled.detail}" if filled.detail else ""
        say(
            console(stderr=True),
            f"{gap.night} on {gap.gpu}: {count} of {gap.missing} missing results filled in{reason}",
        )


def _show(reports: Sequence[KindReport], as_json: bool, folder: Path | None) -> None:
    from flexq_bench.ci.reports import nightly as night

    if as_json:
        print_json([asdict(report) for report in reports])
    else:
        for line in night.lines(reports):
            say(console(), line)
    if folder is not None:
        (folder / "nightly.md").write_text(night.markdown(reports), encoding="utf-8")
        (folder / "nightly.xml").write_text(night.junit(reports), encoding="utf-8")
        data = json.dumps([asdict(report) for report in reports], indent=2, ensure_ascii=False)
        (folder / "nightly.json").write_text(data + "\n", encoding="utf-8")


def exit_code(reports: Sequence[KindReport], *, alerting: bool) -> ExitCode:
    """Return the worst exit code of the reports.

    Changes that join an open alert don't count; without alerts all regressions count.
    """
    codes = []
    for report in reports:
        news = report.opened if alerting else report.worse
        if news or report.statuses.get("incorrect"):
            codes.append(ExitCode.REGRESSION)
        if report.received < report.planned or report.outcome != "complete":
            codes.append(ExitCode.MISSING)
        if report.statuses.get("failed"):
            codes.append(ExitCode.INFRASTRUCTURE)
    return ExitCode(worst_exit_code(codes))
