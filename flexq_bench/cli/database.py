"""`flexq-bench db`: maintenance of the database, import and export of results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from flexq_bench.cli import tokens
from flexq_bench.cli.external_results import (
    OWN_PROJECT,
    STATEMENT_TIMEOUT_S,
    ExternalResultOptions,
    ImportFormatOption,
    export_external,
    import_external,
)
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.cli.progress import progress
from flexq_bench.db import engine, maintenance, queries
from flexq_bench.db.backup import is_backup, restore_backup, write_backup
from flexq_bench.db.copy import copy_database
from flexq_bench.db.engine import Session, open_database
from flexq_bench.db.exchange import ImportSummary, import_in_parts, write_records
from flexq_bench.db.maintenance import compact, prune_samples
from flexq_bench.db.queries import Filters
from flexq_bench.db.records import MODEL_KINDS, AnyRecord, Record
from flexq_bench.db.releases import store_releases
from flexq_bench.errors import UsageError
from flexq_bench.repository.git import commits_of_tags
from flexq_bench.repository.worktrees import repository_of
from flexq_bench.sweeps.text import split_names, split_sizes
from flexq_bench.workloads.names import unknown

_SHOWN_EVERY = 100  # exported records

app = typer.Typer(help="Upgrade, fill, empty and inspect the database.", no_args_is_help=True)
app.add_typer(tokens.app, name="token")


@app.command()
def upgrade(db: DbOption = None, as_json: JsonFlag = False) -> None:
    """Bring the tables up to this version."""
    with (
        engine.open_database(db, check_schema=False, silence_s=STATEMENT_TIMEOUT_S) as database,
        progress("upgrading"),
    ):
        before = engine.revision_of(database)
        after = engine.upgrade(database).after
        if as_json:
            print_json({"database": database.url, "before": before, "after": after})
        elif before == after:
            say(console(), f"{database.url} is up to date (revision {after})")
        else:
            say(console(), f"{database.url}: revision {before or 'none'} -> {after}")


@app.command("import")
@takes_option_groups
def import_(
    *,
    files: Annotated[
        list[str],
        typer.Argument(
            help=".jsonl, .jsonl.gz or .parquet files; with --format files of another tool."
        ),
    ],
    format_name: ImportFormatOption = None,
    origin: ExternalResultOptions,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Store the records of files, in short transactions; known records are skipped.

    A backup of `db export --all` is restored into an empty database.

    With --format: results of another tool, at a commit of another project. Their series are judged
    by history alone. Invalid results are refused by name, the others are stored.

    Exit code 0: all is stored; 2: a file or a result was refused.
    """
    if format_name is not None:
        import_external(files, format_name, origin, db, as_json)
        return
    origin.refuse_any()
    if any(map(is_backup, files)):
        if len(files) > 1:
            raise UsageError("a backup of `db export --all` is restored alone: name one file")
        _restore(files[0], db, as_json=as_json)
        return
    done: list[ImportSummary] = []
    with (
        open_database(db, silence_s=STATEMENT_TIMEOUT_S) as database,
        progress("importing", len(files)) as bar,
    ):
        for path in files:
            done.append(import_in_parts(database, path))
            bar.advance(path)
            if not as_json:
                new = f"{done[-1].added} of {done[-1].read} records are new"
                say(console(), f"{path}: {new} in {database.url}")
    if as_json:
        print_json(done)


@dataclass(frozen=True)
class FilterOptions:
    """Options that select the records of an export; None: all of them."""

    runs: Annotated[
        str | None, typer.Option("--run", metavar="RUNS", help="Only results of these runs.")
    ] = None
    suites: Annotated[str | None, typer.Option(metavar="NAMES")] = None
    kernels: Annotated[str | None, typer.Option(metavar="NAMES", help="Names without variant.")] = (
        None
    )
    models: Annotated[str | None, typer.Option(metavar="NAMES")] = None
    devices: Annotated[
        str | None,
        typer.Option(metavar="SKUS", help="Only GPUs with these names (list devices)."),
    ] = None
    m: Annotated[str | None, typer.Option(metavar="RANGES")] = None
    projects: Annotated[
        str | None,
        typer.Option(
            "--project",
            metavar="NAMES",
            help=f"Only results of these projects; {OWN_PROJECT}: those of this repository.",
        ),
    ] = None

    def filters(self, session: Session) -> Filters:
        """Return the filters. Raises UsageError for names without stored results."""

        known = queries.filter_values(session)
        projects = _stored_names("project", self.projects, (*known.projects, OWN_PROJECT))
        return Filters(
            runs=tuple(
                queries.run_by_uuid_prefix(session, prefix).uuid
                for prefix in split_names(self.runs) or ()
            ),
            suites=_stored_names("suite", self.suites, known.suites),
            kernels=_stored_names("kernel", self.kernels, known.kernels),
            models=_stored_names("model", self.models, known.models),
            gpus=_stored_names("device", self.devices, known.gpus),
            m=split_sizes(self.m) or (),
            projects=tuple("" if name == OWN_PROJECT else name for name in projects),
        )


@app.command()
@takes_option_groups
def export(
    *,
    file: Annotated[
        str, typer.Argument(help="A .jsonl, .jsonl.gz or .parquet file; with --format any name.")
    ],
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="csv, xlsx, pytorch-hud, bencher, perfherder, openmetrics or flashinfer-bench (a "
            "folder).",
        ),
    ] = None,
    selection: FilterOptions,
    whole: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Everything, as a backup: also verdicts, alerts, calibration, nights, jobs. "
            "`db import` restores it into an empty database.",
        ),
    ] = False,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write stored records to a file. Options select; without one all are written.

    With --format: in the format of another service, only results of the main branch that may be
    compared; csv, xlsx, pytorch-hud and flashinfer-bench contain all of them, the others the newest
    of each series.
    """
    if whole:
        if format_name is not None or selection != FilterOptions():
            raise UsageError(
                "--all writes everything: leave --format and the options that select out"
            )
        _back_up(file, db, as_json=as_json)
        return

    def counted(records: Iterable[Record]) -> Iterator[Record]:
        for number, record in enumerate(records, 1):
            yield record
            if number % _SHOWN_EVERY == 0:
                bar.update(number, None)

    with (
        open_database(db, read_only=True, silence_s=STATEMENT_TIMEOUT_S) as database,
        database.session() as session,
        progress("exporting") as bar,
    ):
        filters = selection.filters(session)
        if format_name is not None:
            filters = replace(filters, main_line=True)
        gemms = counted(queries.stored_records(session, Record, filters))
        if format_name is not None:
            count = export_external(format_name, file, gemms, filters.projects)
            if as_json:
                print_json({"file": file, "format": format_name, "results": count})
            else:
                say(console(), f"{count} results in {file} ({format_name})")
            return
        others: Iterator[AnyRecord] = chain.from_iterable(
            queries.stored_records(session, kind, filters) for kind in MODEL_KINDS.values()
        )
        is_parquet = file.endswith(".parquet")
        left_out = sum(1 for _ in others) if is_parquet else 0
        records: Iterable[AnyRecord] = gemms if is_parquet else chain(gemms, others)
        count = write_records(file, records, stored=True)
    if as_json:
        print_json({"file": file, "records": count, "left_out": left_out})
    else:
        say(console(), f"{count} records in {file}")
        if left_out:
            say(
                console(),
                f"{left_out} results that are no GEMMs are left out: a .jsonl file holds them",
            )


def _back_up(file: str, db: str | None, *, as_json: bool) -> None:
    with (
        open_database(db, read_only=True, silence_s=STATEMENT_TIMEOUT_S) as database,
        database.session() as session,
        progress("exporting") as bar,
    ):
        rows = write_backup(
            session,
            file,
            revision=engine.revision_of(database) or "",
            on_rows=lambda rows: bar.advance(),
        )
    if as_json:
        print_json({"file": file, "rows": rows})
    else:
        say(console(), f"{rows} rows of all tables in {file}")


def _restore(file: str, db: str | None, *, as_json: bool) -> None:
    with (
        open_database(db, check_schema=False, silence_s=STATEMENT_TIMEOUT_S) as database,
        progress("restoring") as bar,
    ):
        revision = engine.upgrade(database).after
        with database.session() as session:
            rows = restore_backup(
                session, file, revision=revision, on_rows=lambda rows: bar.advance()
            )
        if as_json:
            print_json({"database": database.url, "rows": rows})
        else:
            say(console(), f"{file}: {rows} rows restored in {database.url}")


@app.command()
def copy(
    target: Annotated[
        str, typer.Argument(metavar="URL", help="A new SQLite file or an empty postgresql:// URL.")
    ],
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy everything to another database: results, verdicts, alerts, nights and jobs.

    Nothing may be writing to the database meanwhile.
    """
    with (
        open_database(db, read_only=True, silence_s=STATEMENT_TIMEOUT_S) as source,
        engine.open_database(target, check_schema=False, silence_s=STATEMENT_TIMEOUT_S) as copied,
        progress("copying") as bar,
    ):
        engine.upgrade(copied)
        with source.session() as reading, copied.session() as writing:
            rows = copy_database(reading, writing, on_rows=lambda rows: bar.advance())
        if as_json:
            print_json({"database": copied.url, "rows": rows})
        else:
            say(console(), f"copied {rows} rows to {copied.url}")


@app.command()
def prune(
    older_than: Annotated[
        int | None,
        typer.Option(min=0, max=36_500, metavar="DAYS", help="Only results at least this old."),
    ] = None,
    keep_accepted: Annotated[
        bool, typer.Option("--keep-accepted", help="Only results that are not comparable.")
    ] = False,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete raw samples and free their disk space. Summaries stay."""

    if older_than is None and not keep_accepted:
        raise UsageError(
            "prune what? Give --older-than DAYS, or --keep-accepted, or both: else all would go"
        )
    limit = None if older_than is None else datetime.now(UTC) - timedelta(days=older_than)
    with (
        open_database(db, create=False, silence_s=STATEMENT_TIMEOUT_S) as database,
        progress("deleting samples"),
    ):
        with database.session() as session:
            count = prune_samples(session, older_than=limit, keep_accepted=keep_accepted)
        compact(database)
        if as_json:
            print_json({"database": database.url, "pruned": count})
        else:
            say(console(), f"deleted the samples of {count} measurements in {database.url}")


@app.command()
def tags(db: DbOption = None, as_json: JsonFlag = False) -> None:
    """Store the release tags of the current git tree, as `nightly` does.

    Pages and nights compare with releases.
    """

    commits = commits_of_tags(repository_of(Path.cwd()))
    with open_database(db, create=False, silence_s=STATEMENT_TIMEOUT_S) as database:
        with database.session() as session:
            changed = store_releases(session, commits)
        if as_json:
            print_json({"database": database.url, "tags": len(commits), "changed": changed})
        elif changed:
            say(console(), f"{', '.join(changed)} in {database.url}")
        else:
            say(console(), f"{len(commits)} tags, none of them new at a commit in {database.url}")


@app.command()
def stats(db: DbOption = None, as_json: JsonFlag = False) -> None:
    """Rows, size and schema revision."""

    with (
        open_database(db, read_only=True, silence_s=STATEMENT_TIMEOUT_S) as database,
        database.session() as session,
    ):
        database_stats = maintenance.stats(session)
        if as_json:
            print_json({"database": database.url, **asdict(database_stats)})
            return
        out = console()
        size = database_stats.size_bytes / 2**20
        say(out, f"{database.url}: revision {database_stats.revision}, {size:.1f} MiB")
        for table, rows in database_stats.rows.items():
            out.print(f"{rows:>10,}  {table}")


def _stored_names(kind: str, text: str | None, stored: tuple[str, ...]) -> tuple[str, ...]:
    """Parse names. Raises UsageError with similar names if one has no stored results."""

    names = split_names(text) or ()
    for name in names:
        if name not in stored:
            message = unknown(kind, name, stored) if stored else f"no {kind} {name!r}: nothing is"
            raise UsageError(f"{message} stored")
    return names
