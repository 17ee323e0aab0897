"""`flexq-bench dashboard`: start the Streamlit app on a database."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from dashboard.settings import COMMIT_URL_VARIABLE, PLACE_OF_SHA, READ_ONLY_VARIABLE
from flexq_bench.cli.options import DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.interrupts import ended_by_terminate

_PART = re.compile(r"[A-Za-z0-9._~-]+")  # of a path


def dashboard(
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8501,
    address: Annotated[
        str, typer.Option("--address", help="To listen on; 0.0.0.0 shows it to the network.")
    ] = "127.0.0.1",
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Write nothing, not even notes on alerts.")
    ] = False,
    base_path: Annotated[
        str,
        typer.Option("--base-path", metavar="PATH", help="Below which a proxy serves it."),
    ] = "",
    commit_url: Annotated[
        str | None,
        typer.Option(
            "--commit-url",
            metavar="URL",
            envvar=COMMIT_URL_VARIABLE,
            help="Of a commit, with {sha} in it; pages then link to it.",
            show_default=False,
        ),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open a browser on it.")] = False,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show stored results in the browser until Ctrl-C.

    --json prints the address as JSON before it starts.
    """
    from db.engine import open_database
    from db.urls import ENVIRONMENT_VARIABLE

    _check_commit_url(commit_url)
    _check_base_path(base_path)
    if not address.strip():
        raise UsageError(
            "--address is empty, which would listen on every network: name one, or leave it out "
            "for 127.0.0.1"
        )
    with open_database(db, create=False, read_only=read_only) as database:
        shown = database.url
    _check_port(address, port)
    app = _app_file()
    below = base_path.strip("/")
    url = f"http://{'localhost' if address == '0.0.0.0' else address}:{port}"
    url += f"/{below}" if below else ""
    if as_json:
        print_json({"url": url, "database": shown, "read_only": read_only})
    else:
        say(console(), f"{shown} at {url} (Ctrl-C ends it)")
    environment = os.environ | ({ENVIRONMENT_VARIABLE: db} if db is not None else {})
    if read_only:
        environment[READ_ONLY_VARIABLE] = "1"
    if commit_url:
        environment[COMMIT_URL_VARIABLE] = commit_url
    command = _streamlit(app, address, port, below, open_browser)
    try:
        with ended_by_terminate():
            done = subprocess.run(command, env=environment)
    except KeyboardInterrupt:
        return
    if done.returncode not in (0, -2, 130):
        raise InfrastructureError(
            f"the dashboard ended with status {done.returncode}: its messages above say why"
        )


def _app_file() -> Path:
    spec = importlib.util.find_spec("dashboard")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    app = Path(folders[0]) / "app.py" if folders else None
    if app is None or not app.is_file():
        raise InfrastructureError("the dashboard is not installed: pip install flexq-bench again")
    return app


def _check_port(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise UsageError(
                f"can't listen on {address}:{port} ({error.strerror or error}): give another "
                "--port or --address"
            ) from None


def _check_commit_url(template: str | None) -> None:
    """A link of another scheme than the web's could run in the viewer's browser."""
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


def _streamlit(app: Path, address: str, port: int, below: str, open_browser: bool) -> list[str]:
    return [
        sys.executable,
        *("-m", "streamlit", "run", str(app)),
        *("--server.address", address),
        *("--server.port", str(port)),
        *("--server.baseUrlPath", below),
        *("--server.headless", "false" if open_browser else "true"),
        *("--browser.gatherUsageStats", "false"),
        *("--client.toolbarMode", "viewer"),
        *("--server.fileWatcherType", "none"),
        # A traceback quotes values and paths of this machine: it is for the log, not for viewers.
        *("--client.showErrorDetails", "type"),
        *("--server.maxUploadSize", "1"),  # MB, the least: no page takes files
    ]
