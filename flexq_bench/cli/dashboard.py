"""`flexq-bench dashboard`: start the Streamlit app on a database."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

import flexq_bench
from flexq_bench.cli.listening import AddressOption, AllowHostOption, server_url
from flexq_bench.cli.options import DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.dashboard.settings import (
    COMMIT_URL_VARIABLE,
    PLACE_OF_SHA,
    READ_ONLY_VARIABLE,
    SERVER_VARIABLE,
)
from flexq_bench.db.engine import open_database
from flexq_bench.db.errors import RecordFormatError
from flexq_bench.db.exchange import import_file
from flexq_bench.db.urls import ENVIRONMENT_VARIABLE
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.packages import require_extra
from flexq_bench.repository.provenance import ROOT

_PART = re.compile(r"[A-Za-z0-9._~-]+")  # of a path


def dashboard(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8501,
    address: AddressOption = "127.0.0.1",
    allow_host: AllowHostOption = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Write nothing, not even notes on alerts.")
    ] = False,
    base_path: Annotated[
        str,
        typer.Option(metavar="PATH", help="URL path under which a proxy serves it."),
    ] = "",
    commit_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar=COMMIT_URL_VARIABLE,
            help="URL of a commit, with {sha} in it; pages link to it.",
        ),
    ] = None,
    examples: Annotated[
        bool,
        typer.Option(
            "--examples",
            help="Show the example records in a temporary database; yours is not changed.",
        ),
    ] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show stored results in the browser until Ctrl-C.

    --json prints the address as JSON before it starts.
    """
    require_extra("dashboard", "dashboard")

    from flexq_bench.read_api.browser_guard import HOSTS_VARIABLE, allowed_hosts

    if examples and db is not None:
        raise UsageError("--examples uses a temporary database: leave --db out")
    _check_commit_url(commit_url)
    _check_base_path(base_path)
    url = server_url(address, port)
    app = _server_file()
    path = base_path.strip("/")
    url += f"/{path}" if path else ""
    environment = os.environ | {
        SERVER_VARIABLE: "1",
        HOSTS_VARIABLE: ",".join(allowed_hosts(address, allow_host or ())),
    }
    if read_only:
        environment[READ_ONLY_VARIABLE] = "1"
    if commit_url:
        environment[COMMIT_URL_VARIABLE] = commit_url
    with ended_by_terminate(), ExitStack() as temporary:
        if examples:
            db = str(temporary.enter_context(_example_database()))
        if db is not None:
            environment[ENVIRONMENT_VARIABLE] = db
        with open_database(db, create=False, read_only=read_only) as database:
            url_of_database = database.url
        if as_json:
            print_json({"url": url, "database": url_of_database, "read_only": read_only})
        else:
            say(console(), f"{url_of_database} at {url} (Ctrl-C ends it)")
        _serve(_streamlit(app, address, port, path, open_browser), environment)


def _serve(command: list[str], environment: dict[str, str]) -> None:
    """Run Streamlit until it exits."""
    try:
        done = subprocess.run(command, env=environment)
    except KeyboardInterrupt:
        return
    if done.returncode not in (0, -2, 130):
        raise InfrastructureError(
            f"the dashboard ended with status {done.returncode}: its messages above say why"
        )


@contextmanager
def _example_database() -> Iterator[Path]:
    """Create a temporary database of the example records."""
    files = _example_files()
    with tempfile.TemporaryDirectory(prefix="flexq-bench-examples-") as folder:
        path = Path(folder) / "examples.sqlite"
        stored = 0
        with open_database(str(path)) as database:
            for file in files:
                try:
                    with database.session() as session:
                        stored += import_file(session, file).added
                except RecordFormatError:
                    continue  # a benchmark's table, not records
        if not stored:
            raise InfrastructureError("the example records hold no result: get the files again")
        yield path


def _example_files() -> list[Path]:
    """Return the record files of the repository's examples, by name. Raises UsageError.

    Subfolders of a machine's folder are excluded, because the names of their nights are not unique.
    """
    folder = ROOT / "examples"
    files = [*folder.glob("*/*.parquet"), *folder.glob("*/*.jsonl.gz")]
    if not files:
        raise UsageError(
            "the example records are not here: they come with the repository, not with an "
            "installed package, so start it from a clone"
        )
    return sorted(files)


def _server_file() -> Path:
    app = Path(flexq_bench.__file__).parent / "dashboard" / "server.py"
    if not app.is_file():
        raise InfrastructureError("the dashboard is not installed: pip install flexq-bench again")
    return app


def _check_commit_url(template: str | None) -> None:
    """Raise UsageError for schemes other than http(s), which could run code in the browser."""
    if not template:
        return
    if not template.startswith(("https://", "http://")) or PLACE_OF_SHA not in template:
        raise UsageError(
            f"--commit-url {template!r} is no web address with {PLACE_OF_SHA} in it: give one like "
            f"https://github.com/OWNER/REPOSITORY/commit/{PLACE_OF_SHA}"
        )


def _check_base_path(path: str) -> None:
    parts = path.strip("/").split("/")
    if path and not all(_PART.fullmatch(part) and part.strip(".") for part in parts):
        raise UsageError(
            f"--base-path {path!r} is no path of an address: write it of letters, digits, -, _, . "
            "and ~, such as team/flexq"
        )


def _streamlit(app: Path, address: str, port: int, path: str, open_browser: bool) -> list[str]:
    return [
        sys.executable,
        *("-m", "streamlit", "run", str(app)),
        *("--server.address", address),
        *("--server.port", str(port)),
        *("--server.baseUrlPath", path),
        *("--server.headless", "false" if open_browser else "true"),
        *("--browser.gatherUsageStats", "false"),
        *("--client.toolbarMode", "viewer"),
        *("--server.fileWatcherType", "none"),
        # Tracebacks contain values and paths of this machine: they go to the log only.
        *("--client.showErrorDetails", "type"),
        *("--server.maxUploadSize", "1"),  # MB, the smallest value: no page accepts files
        # Of h1 and h2. Set for both themes: setting it in [theme] would disable the dark one.
        *("--theme.light.headingFontSizes", '["2.25rem", "1.5rem"]'),
        *("--theme.dark.headingFontSizes", '["2.25rem", "1.5rem"]'),
    ]
