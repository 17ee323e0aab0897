"""`flexq-bench dashboard`: how the app is started."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexq_bench.cli.app import app
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.exit_codes import ExitCode
from flexq_bench.repository.provenance import ROOT


@pytest.fixture
def started(database: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """started("--base-path", "x"): what the app would be started with."""
    open_database(str(database)).close()
    calls: list[Any] = []

    def start(command: list[str], env: dict[str, str]) -> Any:
        calls.append(SimpleNamespace(options=_options(command), environment=env))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("flexq_bench.cli.dashboard.subprocess.run", start)
    monkeypatch.delenv("FLEXQ_BENCH_COMMIT_URL", raising=False)

    def run(*arguments: str) -> Any:
        ran = cli("dashboard", "--port", "18766", *arguments)
        assert ran.code == 0, ran.err
        return calls[-1]

    return run


def _options(command: list[str]) -> dict[str, str]:
    start = command.index("run") + 2
    return dict(zip(command[start::2], command[start + 1 :: 2], strict=True))


def test_defaults_protect_machine_and_viewers(started):
    options = started().options

    assert options["--server.address"] == "127.0.0.1"
    assert options["--client.showErrorDetails"] == "type"
    assert options["--server.maxUploadSize"] == "1"
    assert options["--browser.gatherUsageStats"] == "false"
    assert started("--address", "0.0.0.0").options["--server.address"] == "0.0.0.0"


def test_app_gets_requested_database_read_only(started, cli, tmp_path):
    other = str(tmp_path / "other.sqlite")
    cli("db", "upgrade", "--db", other)

    environment = started("--db", other, "--read-only").environment

    assert environment["FLEXQ_BENCH_DB"] == other
    assert environment["FLEXQ_BENCH_READ_ONLY"] == "1"


def test_missing_database_is_usage_error(cli, database):
    ran = cli("dashboard")

    assert ran.code == ExitCode.USAGE
    assert "flexq-bench run smoke" in ran.error


@pytest.mark.parametrize("verb", ["dashboard", "serve-api"])
def test_address_that_cannot_be_bound_is_usage_error(cli, measured, verb):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = ("--port", str(server.getsockname()[1]))
        for arguments, says in ((taken, "another --port"), (("--address", " "), "is empty")):
            ran = cli(verb, *arguments)
            assert ran.code == ExitCode.USAGE
            assert says in ran.error


def test_protection_of_streamlit_stays_on(started):
    options = started("--base-path", "/bench/").options

    assert options["--server.baseUrlPath"] == "bench"
    assert not any("xsrf" in name.lower() or "cors" in name.lower() for name in options)


def test_commit_url_is_passed_to_app(started):
    template = "https://example.org/c/{sha}"

    assert started("--commit-url", template).environment["FLEXQ_BENCH_COMMIT_URL"] == template
    assert "FLEXQ_BENCH_COMMIT_URL" not in started().environment


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--commit-url", "javascript:alert('{sha}')"), "/OWNER/REPOSITORY/commit/{sha}"),
        (("--commit-url", "https://example.org/c/"), "/OWNER/REPOSITORY/commit/{sha}"),
    ],
)
def test_invalid_options_are_usage_errors(cli, arguments, says):
    ran = cli("dashboard", *arguments)

    assert ran.code == ExitCode.USAGE
    assert says in ran.error


def test_demo_uses_a_temporary_database(started, database, monkeypatch):
    before = database.read_bytes()
    seen: dict[str, Any] = {}

    def look(command: list[str], env: dict[str, str]) -> Any:
        path = Path(env["FLEXQ_BENCH_DB"])
        with open_database(str(path), read_only=True) as opened, opened.session() as session:
            contents = (
                queries.gpu_names(session),
                queries.decoded_models(session),
                queries.scored_models(session),
                queries.alerts(session),
                queries.unfinished_nights(session),
            )
        seen.update(path=path, contents=contents)
        return SimpleNamespace(returncode=0)

    started()
    monkeypatch.setattr("flexq_bench.cli.dashboard.subprocess.run", look)
    app(["demo", "--port", "18766"], standalone_mode=False)

    gpus, decoded, scored, alerts, unfinished = seen["contents"]
    assert "NVIDIA H200" in gpus
    assert all((decoded, scored, alerts))
    assert not unfinished
    assert not seen["path"].exists()
    assert seen["path"] != database
    assert database.read_bytes() == before


def test_demo_is_small_enough_for_a_wheel():
    assert (ROOT / "dashboard" / "demo.sqlite.xz").stat().st_size < 3_000_000
