"""`--format` of `db import` and `db export`: results in the formats of other tools and services."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.output import console, print_json, say
from flexq_bench.db.engine import Database, Session, open_database
from flexq_bench.db.exchange import replacing
from flexq_bench.db.records import CommitInfo, Record
from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.importing import COMMIT_DIGITS, full_commits, store_readings
from flexq_bench.exit_codes import ExitCode
from flexq_bench.repository.ancestry import measured_branch
from flexq_bench.repository.provenance import commits_at
from flexq_bench.repository.worktrees import repository_of, resolve_revision
from flexq_bench.runs.commit_history import store_history
from flexq_bench.workloads.names import unknown

if TYPE_CHECKING:
    from flexq_bench.ci.history_alerts import HistoryVerdicts
    from flexq_bench.exchange.external.importing import Imported
    from flexq_bench.exchange.external.records import Origin
    from flexq_bench.exchange.external.result import Reading
    from flexq_bench.results.paired_questions import PairedVerdict

TRACES = "flashinfer-bench"  # a folder, unlike the formats of exchange.external
OWN_PROJECT = "flexq-bench"  # name of this repository's results, which have no project
STATEMENT_TIMEOUT_S = 3600.0  # statements on a large table take long even on a healthy server
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
_SHA = re.compile(r"[0-9a-f]{7,64}")
_SUITE_KERNELS = ("cublas-fp16", "cublaslt-w8a8", "flexq-w6a8")  # of a new suite file
_MAX_TEXT = 100  # letters of options
_MAX_PRINTED = 20  # refused results that are printed by name
_MAX_REMARKS = 5  # that are printed
_AUTO = "auto"  # the format, by the content

external_option = partial(typer.Option, rich_help_panel="Results of other tools")

ImportFormatOption = Annotated[
    str | None,
    external_option(
        "--format",
        metavar="NAME",
        help="auto (by the content), csv, jsonl, flashinfer-bench (a folder of traces), or the "
        "format of a tool; a wrong name lists them.",
    ),
]


@dataclass(frozen=True)
class ExternalResultOptions:
    """Origin of imported results; options that belong to --format."""

    commit: Annotated[
        str | None,
        external_option(
            "--commit", metavar="SHA", help="The measured commit, of results that name none."
        ),
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
            help="Branch of commits that no clone shows. Default: of the CI job.",
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
    occasion: Annotated[
        str | None,
        external_option(
            "--occasion",
            metavar="ID",
            help="Id of the run: another one is a further measurement of the same commit. Default: "
            "the id or the time in the file; without either, results of a commit replace its "
            "earlier ones.",
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
    from flexq_bench.ci.imported_history import judge_imported
    from flexq_bench.exchange.external.formats import (
        FORMATS,
        READ_IN_PARTS,
        detect_format,
        read_results,
    )
    from flexq_bench.exchange.flashinfer_traces import read_traces
    from flexq_bench.results.paired_questions import paired_verdicts

    if format_name not in (*FORMATS, TRACES, _AUTO):
        raise UsageError(unknown("format", format_name, (*FORMATS, TRACES, _AUTO)))
    if options.suite is not None:
        _write_suite(files, format_name, options, as_json)
        return
    origin = _origin(options)

    def readings(path: str) -> Iterable[Reading]:
        if format_name == TRACES:
            return [read_traces(path)]
        name = detect_format(path) if format_name == _AUTO else format_name
        parts = read_results(name, path)
        return parts if name in READ_IN_PARTS else list(parts)

    read = {}  # a file that is read in parts is read once more
    for path in files:  # read all files before storing any
        read[path] = readings(path)
        _check(path, read[path], origin)
    imported = []
    with open_database(db, silence_s=STATEMENT_TIMEOUT_S) as database:
        commits = _Commits(database, options)
        for path in files:
            again = read.pop(path, None)
            parts = again if isinstance(again, list) else readings(path)
            done = store_readings(database, _noted(path, parts, origin), origin, commits.describe)
            verdicts = judge_imported(database, done.series, alerting=options.alert)
            with database.session() as session:
                begun = _new_breaks(session, done)
                paired = paired_verdicts(session, done.series) if done.has_questions else []
            for text in begun:
                say(console(stderr=True), f"{path}: {text}")
            refused = tuple(f"{result.name}: {result.reason}" for result in done.refused)
            counts = done.read, done.added, done.replaced
            summary = _Imported(path, *counts, refused, verdicts, tuple(paired))
            imported.append(summary)
            _note_quality(path, done, origin.device)
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
    """An imported file. read: valid results; added: new ones; replaced: corrected ones; refused:
    others, with reasons. paired: verdicts by question."""

    path: str
    read: int
    added: int
    replaced: int
    refused: tuple[str, ...]
    verdicts: HistoryVerdicts
    paired: tuple[PairedVerdict, ...]


def _check(path: str, readings: Iterable[Reading], origin: Origin) -> None:
    """Read a file without storing it. Raises UsageError if nothing of it can be stored.

    Of a file that is read in parts, what follows the first part is not parsed.
    """
    from flexq_bench.exchange.external.csv_results import check_text
    from flexq_bench.exchange.external.records import commit_in_file, is_future

    is_empty = True
    for reading in readings:
        is_empty = is_empty and not reading.results and not reading.refused
        if origin.time is None and reading.created_at and is_future(reading.created_at):
            raise UsageError(
                f"{path}: its time is {reading.created_at}, in the future: give --time"
            )
        commits = (commit_in_file(result, reading, origin) for result in reading.results)
        if reading.results and not any(commits):
            raise UsageError(f"{path} names no commits: give --commit SHA with --format")
        if reading.results and not isinstance(readings, list):
            check_text(path)
            return
    if is_empty:
        raise UsageError(f"{path} has no results: did its tool run? Nothing was stored")


def _new_breaks(session: Session, done: Imported) -> list[str]:
    """Return notes on series that begin with these results, in place of another unit's."""
    from flexq_bench.results.series_breaks import series_breaks

    if not done.series:
        return []
    return [
        series_break.text
        for series_break in series_breaks(session, done.series)
        if series_break.first.run in done.runs
    ]


def _origin(options: ExternalResultOptions) -> Origin:
    """Check the options. Raises UsageError."""
    from flexq_bench.exchange.external.records import Origin, is_future
    from flexq_bench.exchange.external.result import iso_time

    if options.project is None:
        raise UsageError("whose results? Give --project NAME with --format")
    for name in ("device", "occasion", "branch"):
        text = getattr(options, name) or ""
        if not text.isprintable() or len(text) > _MAX_TEXT:
            raise UsageError(
                f"--{name} {text!r:.50}: write a name without control characters, of at most "
                f"{_MAX_TEXT} letters"
            )
    if not _NAME.fullmatch(options.project):
        raise UsageError(
            f"--project {options.project!r}: letters, digits and . _ / - make a name, 100 at most"
        )
    time = iso_time(options.time)
    if options.time is not None and time is None:
        raise UsageError(f"--time {options.time}: write it as 2026-01-31T02:00:00+00:00")
    if time is not None and is_future(time):
        raise UsageError(f"--time is {time}, in the future: give --time")
    return Origin(
        project=options.project,
        commit=None if options.commit is None else _commit(options, options.commit),
        device=(options.device or "").strip(),
        branch=options.branch or "",
        time=time,
        occasion=(options.occasion or "").strip(),
    )


def _commit(options: ExternalResultOptions, revision: str) -> CommitInfo:
    """Return the commit of --commit, in full if the clone has it. Raises UsageError."""
    try:
        repository = repository_of(options.repository or Path.cwd())
        sha = resolve_revision(repository, revision)
        return CommitInfo(sha, None, None, dirty=False)
    except UsageError:
        # A whole id is good without the clone having it: it is ordered by time.
        if options.repository is not None and len(revision) not in COMMIT_DIGITS:
            raise
    sha = revision.lower()
    if not _SHA.fullmatch(sha):
        raise UsageError(
            f"--commit {revision!r} is no hexadecimal sha, and no revision of the git tree "
            "you are in: give its sha, or --repository FOLDER"
        )
    return CommitInfo(sha, None, None, dirty=False)


class _Commits:
    """Commits as the clone describes them; abbreviated ones as the database has them."""

    def __init__(self, database: Database, options: ExternalResultOptions) -> None:
        self._database, self._options = database, options
        self._known: dict[str, CommitInfo] = {}
        self._clone: Path | None = None
        with suppress(UsageError):  # no git tree
            self._clone = repository_of(options.repository or Path.cwd())

    def describe(self, commits: Collection[CommitInfo]) -> dict[str, CommitInfo]:
        """Return commits in full, by the sha that was given; store their history."""
        new = [commit for commit in commits if commit.sha not in self._known]
        shas = [commit.sha for commit in new]
        known_commits = {} if self._clone is None or not shas else commits_at(self._clone, shas)
        for commit in new:
            known = known_commits.get(commit.sha)
            branch = commit.branch or self._options.branch or ""
            if not branch and len(new) == 1:  # of many, the job's branch says nothing
                branch = measured_branch(*(() if known is None else (self._clone, known.sha)))
            found_one = known or self._whole(commit)
            project = self._options.project or ""
            self._known[commit.sha] = replace(found_one, branch=branch, project=project)
        if self._options.repository is not None and len(known_commits) < len(shas):
            missing = [sha for sha in shas if sha not in known_commits]
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            say(
                console(stderr=True),
                f"{self._options.repository} does not have {missing[0][:10]}{others}: such results "
                "are ordered by their time (git fetch, in a shallow clone git fetch --unshallow)",
            )
        described = {commit.sha: self._known[commit.sha] for commit in commits}
        if note := store_history(self._database, *(described[sha] for sha in known_commits)):
            say(console(stderr=True), note)
        return described

    def _whole(self, commit: CommitInfo) -> CommitInfo:
        """Return an abbreviated commit in full if the database has it; else print a warning."""
        whole = full_commits(self._database, self._options.project or "", [commit])[commit.sha]
        if len(whole.sha) not in COMMIT_DIGITS:
            say(
                console(stderr=True),
                f"commit {commit.sha} is abbreviated, and neither a repository here nor the "
                "database has it: give the full id, or results with the full id will belong to "
                "another commit",
            )
        return whole


def _noted(path: str, readings: Iterable[Reading], origin: Origin) -> Iterator[Reading]:
    """Print a note on stderr if a file's tool ran at another commit than --commit."""
    for place, reading in enumerate(readings):
        sha = origin.commit.sha if origin.commit is not None else ""
        if not place and sha and reading.commit and not reading.commit.startswith(sha):
            say(
                console(stderr=True),
                f"{path} was made at commit {reading.commit[:10]} and is stored as of {sha[:10]}: "
                f"if these are results of its own commit, give --commit {reading.commit}",
            )
        yield reading


def _note_quality(path: str, done: Imported, device: str) -> None:
    """Print notes on stderr: results without a device, and what makes results less comparable."""
    from flexq_bench.exchange.external.records import UNKNOWN_DEVICE

    errors = console(stderr=True)
    if done.without_device and not device:
        machine = f" ({done.machine})" if done.machine else ""
        all_of_them = done.without_device == done.read + len(done.refused)
        which = "its results" if all_of_them else f"{done.without_device} of its results"
        say(
            errors,
            f"{path} names no device{machine}: {which} are stored in series of {UNKNOWN_DEVICE!r}; "
            "give --device NAME to keep machines apart",
        )
    for remark, number in done.remarks.most_common(_MAX_REMARKS):
        say(errors, f"{path}: {number} of {done.read} results: {remark}")
    if len(done.remarks) > _MAX_REMARKS:
        say(errors, f"{path}: {len(done.remarks) - _MAX_REMARKS} more remarks are stored")


def _print_summary(summary: _Imported, database: Database) -> None:
    out = console()
    corrected = f", {summary.replaced} replaced" if summary.replaced else ""
    say(
        out,
        f"{summary.path}: {summary.added} of {summary.read} results are new{corrected} in "
        f"{database.url}",
    )
    errors = console(stderr=True)
    for text in summary.refused[:_MAX_PRINTED]:
        say(errors, f"{summary.path}: refused {text}")
    if len(summary.refused) > _MAX_PRINTED:
        say(errors, f"{summary.path}: refused {len(summary.refused) - _MAX_PRINTED} more")
    verdicts = summary.verdicts
    say(out, f"{verdicts.series} series judged by history alone: {_alerts_text(verdicts)}")
    for text in (
        *(verdict.text for verdict in summary.paired),
        *(verdict.text for verdict in verdicts.changed),
    ):
        say(out, text)


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

    projects: those requested. Raises UsageError for an unknown format, and for projects or results
    that the format can't represent.
    """
    from flexq_bench.exchange.exports.formats import EXPORTS, write_export
    from flexq_bench.exchange.flashinfer_traces import write_traces

    if format_name == TRACES:
        if external_projects := [name for name in projects if name]:
            raise UsageError(
                f"{TRACES} traces are of kernels of this repository, whose formats are known: "
                f"leave --project {external_projects[0]} out, or take another format"
            )
        if not (written := write_traces(file, records)):
            raise UsageError(
                f"no result can be a trace of {TRACES}: they are of kernels of this program (not "
                "of --kernels-from), cold, with checked outputs; take another format"
            )
        return written
    if format_name not in EXPORTS:
        raise UsageError(unknown("format", format_name, (*EXPORTS, TRACES)))
    return write_export(format_name, file, records)
