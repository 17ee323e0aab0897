"""`flexq-bench dashboard`: start the Streamlit app on a database."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
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
from flexq_bench.db.urls import ENVIRONMENT_VARIABLE
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.packages import require_extra

_PART = re.compile(r"[A-Za-z0-9._~-]+")  # of a path


PortOption = Annotated[int, typer.Option(min=1, max=65535)]


def dashboard(
    port: PortOption = 8501,
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
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show stored results in the browser until Ctrl-C.

    --json prints the address as JSON before it starts.
    """
    show(
        db,
        port=port,
        address=address,
        allow_host=allow_host or (),
        read_only=read_only,
        base_path=base_path,
        commit_url=commit_url,
        open_browser=open_browser,
        as_json=as_json,
    )


def show(
    db: str | None,
    *,
    port: int,
    address: str = "127.0.0.1",
    allow_host: Sequence[str] = (),
    read_only: bool = False,
    base_path: str = "",
    commit_url: str | None = None,
    open_browser: bool = False,
    as_json: bool = False,
) -> None:
    """Run the app on a database until Ctrl-C; arguments as the options of `dashboard`."""
    require_extra("dashboard", "dashboard")

    from flexq_bench.read_api.browser_guard import HOSTS_VARIABLE, allowed_hosts

    _check_commit_url(commit_url)
    _check_base_path(base_path)
    url = server_url(address, port)
    app = _server_file()
    path = base_path.strip("/")
    url += f"/{path}" if path else ""
    environment = os.environ | {
        SERVER_VARIABLE: "1",
        HOSTS_VARIABLE: ",".join(allowed_hosts(address, allow_host)),
    }
    if read_only:
        environment[READ_ONLY_VARIABLE] = "1"
    if commit_url:
        environment[COMMIT_URL_VARIABLE] = commit_url
    if db is not None:
        environment[ENVIRONMENT_VARIABLE] = db
    with ended_by_terminate():
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
