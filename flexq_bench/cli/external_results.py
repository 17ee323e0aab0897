"""`--format` of `db import` and `db export`: results in the formats of other tools and services."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.output import console, print_json, say
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, Session, open_database
from flexq_bench.db.exchange import replacing
from flexq_bench.db.records import CommitInfo, Record
from flexq_bench.db.store import add_records
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.repository.ancestry import measured_branch
from flexq_bench.repository.provenance import commit_at
from flexq_bench.repository.worktrees import repository_of, resolve_revision
from flexq_bench.runs.commit_history import store_history
from flexq_bench.workloads.names import unknown

if TYPE_CHECKING:
    from flexq_bench.ci.history_alerts import HistoryVerdicts
    from flexq_bench.exchange.external.result import Reading

TRACES = "flashinfer-bench"  # a folder, unlike the formats of exchange.external
OWN_PROJECT = "flexq-bench"  # name of this repository's results, which have no project
STATEMENT_TIMEOUT_S = 3600.0  # statements on a large table take long even on a healthy server
_COMMIT_DIGITS = (40, 64)  # hexadecimal, of a whole SHA-1 and SHA-256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
_SHA = re.compile(r"[0-9a-f]{7,64}")
_SUITE_KERNELS = ("cublas-fp16", "cublaslt-w8a8", "flexq-w6a8")  # of a new suite file
_MAX_CLOCK_SKEW = timedelta(days=1)  # between machines and time zones
_MAX_PRINTED = 20  # refused results that are printed by name

external_option = partial(typer.Option, rich_help_panel="Results of other tools")

ImportFormatOption = Annotated[
    str | None,
    external_option(
        "--format",
        metavar="NAME",
        help="nvbench, google-benchmark, pytest-benchmark, criterion, csv or flashinfer-bench (a "
        "folder of traces).",
    ),
]


@dataclass(frozen=True)
class ExternalResultOptions:
    """Origin of imported results; options that belong to --format."""

    commit: Annotated[
        str | None,
        external_option("--commit", metavar="SHA", help="The measured commit of the project."),
    ] = None
    project: Annotated[
        str | None,
        external_option("--project", metavar="NAME", help="Project of the results."),
    ] = None
    repository: Annotated[
        Path | None,
        external_option(
            "--repository",
            metavar="FOLDER",
            help="The project's clone, for the order of commits. Default: the current git tree, if "
            "it has the commit.",
        ),
    ] = None
    branch: Annotated[
        str | None,
        external_option(
            "--branch",
            metavar="NAME",
            help="Branch of the commit, if no clone shows it. Default: of the CI job.",
        ),
    ] = None
    device: Annotated[
        str | None,
        external_option(
            "--device",
            metavar="NAME",
            help="Device of the results. Default: the one in the file.",
        ),
    ] = None
    time: Annotated[
        str | None,
        external_option(
            "--time",
            metavar="ISO",
            help="Time of the results. Default: the one in the file, else now.",
        ),
    ] = None
    alert: Annotated[
        bool,
        external_option("--alert/--no-alert", help="Open and close alerts by history alone."),
    ] = True
    suite: Annotated[
        Path | None,
        external_option(
            "--suite",
            metavar="FILE",
            help="flashinfer-bench: store nothing, but write the shapes of the GEMMs as a suite.",
        ),
    ] = None

    def refuse_any(self) -> None:
        """Raise UsageError if one is given, as they have no meaning without --format."""
        for option in fields(self):
            if getattr(self, option.name) != option.default:
                name = "--no-alert" if option.name == "alert" else f"--{option.name}"
                raise UsageError(f"{name} is of results of other tools: give --format, too")


def import_external(
    files: Sequence[str],
    format_name: str,
    options: ExternalResultOptions,
    db: str | None,
    as_json: bool,
) -> None:
    """Read and store results, judge their histories, print a summary.

    Raises typer.Exit(2) if results were refused, UsageError for missing or wrong options, and for a
    file of another format.
    """
    from flexq_bench.exchange.external.formats import FORMATS, read_results
    from flexq_bench.exchange.flashinfer_traces import read_traces

    if format_name not in (*FORMATS, TRACES):
        raise UsageError(unknown("format", format_name, (*FORMATS, TRACES)))
    if options.suite is not None:
        _write_suite(files, format_name, options, as_json)
        return
    commit = _commit(options)
    read = read_traces if format_name == TRACES else partial(read_results, format_name)
    readings = []
    for path in files:  # read all files before storing any
        reading = read(path)
        readings.append((path, reading, _records(path, reading, format_name, options, commit)))
    imported = []
    with open_database(db, silence_s=STATEMENT_TIMEOUT_S) as database:
        whole = _whole(database, commit)
        if note := store_history(database, whole):
            say(console(stderr=True), note)
        for path, reading, _ in readings:
            _note_other_commit(path, reading, whole)
            _note_unknown_device(path, reading, options)
        for path, reading, records_of_file in readings:
            records = records_of_file
            if whole != commit:
                records = _records(path, reading, format_name, options, whole)
            with database.session() as session:
                added, verdicts = _store(session, records, alerting=options.alert)
                begun = _new_breaks(session, records)
            for text in begun:
                say(console(stderr=True), f"{path}: {text}")
            refused = tuple(f"{result.name}: {result.reason}" for result in reading.refused)
            summary = _Imported(path, len(records), added, refused, verdicts)
            imported.append(summary)
            if not as_json:
                _print_summary(summary, database)
        if as_json:
            print_json(imported)
    if any(summary.refused for summary in imported):
        raise typer.Exit(int(ExitCode.USAGE))


def _write_suite(
    files: Sequence[str], format_name: str, options: ExternalResultOptions, as_json: bool
) -> None:
    from flexq_bench.exchange.flashinfer_traces import suite_text

    if format_name != TRACES or len(files) != 1 or options.suite is None:
        raise UsageError(f"--suite is of one folder of traces: give --format {TRACES} FOLDER")
    text = suite_text(files[0], _SUITE_KERNELS)
    with replacing(options.suite) as file:
        file.write(text.encode())
    groups = text.count("[[group]]")
    if as_json:
        print_json({"file": str(options.suite), "shapes": groups})
    else:
        say(console(), f"{groups} shapes of N and K in {options.suite}: flexq-bench run it")


@dataclass(frozen=True, slots=True)
class _Imported:
    """An imported file. read: valid results; added: new ones; refused: others with reasons."""

    path: str
    read: int
    added: int
    refused: tuple[str, ...]
    verdicts: HistoryVerdicts


def _store(
    session: Session, records: Sequence[Record], *, alerting: bool
) -> tuple[int, HistoryVerdicts]:
    from flexq_bench.ci.history_alerts import HistoryVerdicts, judge_histories
    from flexq_bench.ci.notifications import events

    if not records:
        return 0, HistoryVerdicts()
    added = add_records(session, records)
    rows = queries.run_results(session, records[0].run.uuid)
    series = {row.series_id for row in rows}
    verdicts = judge_histories(session, series, alerting=alerting)
    if alerting:
        events.add_history_events(session, verdicts)
    return added, verdicts


def _new_breaks(session: Session, records: Sequence[Record]) -> list[str]:
    """Return notes on series that begin with these records, in place of another unit's."""
    from flexq_bench.results.series_breaks import series_breaks

    if not records:
        return []
    rows = queries.run_results(session, records[0].run.uuid)
    breaks = series_breaks(session, {row.series_id for row in rows})
    return [one.text for one in breaks if one.first.run == records[0].run.uuid]


def _records(
    path: str,
    reading: Reading,
    format_name: str,
    options: ExternalResultOptions,
    commit: CommitInfo,
) -> list[Record]:
    from flexq_bench.exchange.external.records import Origin, external_records, file_hash
    from flexq_bench.exchange.flashinfer_traces import folder_hash

    if not reading.results and not reading.refused:
        raise UsageError(f"{path} has no results: did its tool run? Nothing was stored")
    origin = Origin(
        project=commit.project,
        format=format_name,
        commit=commit,
        device=(options.device or "").strip()[:100],
        created_at=_created_at(path, reading, options),
        file_hash=folder_hash(path) if Path(path).is_dir() else file_hash(path),
    )
    return external_records(reading.results, origin)


def _created_at(path: str, reading: Reading, options: ExternalResultOptions) -> str:
    """The time of results, ISO 8601 in UTC. Raises UsageError."""
    from flexq_bench.exchange.external.result import iso_time

    now = datetime.now(UTC)
    time = iso_time(options.time)
    if options.time is not None and time is None:
        raise UsageError(f"--time {options.time}: write it as 2026-01-31T02:00:00+00:00")
    created_at = time or reading.created_at or now.isoformat()
    # It would be ordered after all later results.
    if datetime.fromisoformat(created_at) > now + _MAX_CLOCK_SKEW:
        what = "--time" if time else f"{path}: its time"
        raise UsageError(f"{what} is {created_at}, in the future: give --time")
    return created_at


def _commit(options: ExternalResultOptions) -> CommitInfo:
    """The commit, with its data from the repository if possible. Raises UsageError."""

    if options.project is None or options.commit is None:
        raise UsageError("whose results? Give --project NAME and --commit SHA with --format")
    if not (options.device or "").isprintable():
        raise UsageError(f"--device {options.device!r}: write a name without control characters")
    if not _NAME.fullmatch(options.project):
        raise UsageError(
            f"--project {options.project!r}: letters, digits and . _ / - make a name, 100 at most"
        )
    try:
        repository = repository_of(options.repository or Path.cwd())
        sha = resolve_revision(repository, options.commit)
        commit = replace(commit_at(repository, sha), project=options.project)
        return replace(commit, branch=options.branch or commit.branch)
    except UsageError:
        # A whole id is good without the clone having it: it is ordered by time.
        if options.repository is not None and len(options.commit) not in _COMMIT_DIGITS:
            raise
    sha = options.commit.lower()
    if not _SHA.fullmatch(sha):
        raise UsageError(
            f"--commit {options.commit!r} is no hexadecimal sha, and no revision of the git tree "
            "you are in: give its sha, or --repository FOLDER"
        )
    if options.repository is not None:
        say(
            console(stderr=True),
            f"{options.repository} does not have {sha[:10]}: its results are ordered by their time "
            "(git fetch, in a shallow clone git fetch --unshallow)",
        )
    branch = options.branch or measured_branch()
    return CommitInfo(sha, None, None, dirty=False, project=options.project, branch=branch)


def _whole(database: Database, commit: CommitInfo) -> CommitInfo:
    """Return an abbreviated commit in full if the database has it; else print a warning."""

    if len(commit.sha) in _COMMIT_DIGITS:
        return commit
    with database.session() as session:
        known = queries.recent_commits(
            session, limit=0, prefixes=[commit.sha], project=commit.project
        )
    if known:
        return replace(commit, sha=known[0].sha)
    say(
        console(stderr=True),
        f"commit {commit.sha} is abbreviated, and neither a repository here nor the database has "
        "it: give the full id, or results with the full id will belong to another commit",
    )
    return commit


def _note_other_commit(path: str, reading: Reading, commit: CommitInfo) -> None:
    """Print a note on stderr if the file's tool ran at another commit than --commit."""
    if reading.commit is None or reading.commit.startswith(commit.sha):
        return
    say(
        console(stderr=True),
        f"{path} was made at commit {reading.commit[:10]} and is stored as of {commit.sha[:10]}: "
        f"if these are results of its own commit, give --commit {reading.commit}",
    )


def _note_unknown_device(path: str, reading: Reading, options: ExternalResultOptions) -> None:
    """Print a note on stderr if neither the file nor --device names the device of its results."""
    from flexq_bench.exchange.external.records import UNKNOWN_DEVICE

    unknown = sum(not result.device for result in reading.results)
    if not unknown or (options.device or "").strip():
        return
    machine = f" ({reading.machine})" if reading.machine else ""
    which = "its results" if unknown == len(reading.results) else f"{unknown} of its results"
    say(
        console(stderr=True),
        f"{path} names no device{machine}: {which} are stored in series of {UNKNOWN_DEVICE!r}; "
        "give --device NAME to keep machines apart",
    )


def _print_summary(summary: _Imported, database: Database) -> None:
    out = console()
    say(out, f"{summary.path}: {summary.added} of {summary.read} results are new in {database.url}")
    errors = console(stderr=True)
    for text in summary.refused[:_MAX_PRINTED]:
        say(errors, f"{summary.path}: refused {text}")
    if len(summary.refused) > _MAX_PRINTED:
        say(errors, f"{summary.path}: refused {len(summary.refused) - _MAX_PRINTED} more")
    verdicts = summary.verdicts
    say(out, f"{verdicts.series} series judged by history alone: {_alerts_text(verdicts)}")
    for change in verdicts.changed:
        say(out, change.text)


def _alerts_text(verdicts: HistoryVerdicts) -> str:
    parts = [
        f"{word} alert{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
        for word, ids in (
            ("opened", verdicts.opened),
            ("joined", verdicts.joined),
        )
        if ids
    ]
    if not verdicts.steps:
        return ", ".join(parts) or "no new change of level"
    changes = f"{verdicts.steps} new change{'s' if verdicts.steps > 1 else ''} of level"
    return ", ".join([changes, *parts])


def export_external(
    format_name: str, file: str, records: Iterable[Record], projects: Sequence[str]
) -> int:
    """Write records in another service's format; returns the number of results.

    projects: those requested. Raises UsageError for an unknown format, and for projects that the
    format can't represent.
    """
    from flexq_bench.exchange.exports.formats import EXPORTS, write_export
    from flexq_bench.exchange.flashinfer_traces import write_traces

    if format_name == TRACES:
        if external_projects := [name for name in projects if name]:
            raise UsageError(
                f"{TRACES} traces are of kernels of this repository, whose formats are known: "
                f"leave --project {external_projects[0]} out, or take another format"
            )
        return write_traces(file, records)
    if format_name not in EXPORTS:
        raise UsageError(unknown("format", format_name, (*EXPORTS, TRACES)))
    return write_export(format_name, file, records)
