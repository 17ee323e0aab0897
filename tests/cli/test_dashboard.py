"""`flexq-bench dashboard`: whom it serves, below which path, and where commits are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexq_bench.cli.app import app
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.exit_codes import ExitCode


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


def test_it_listens_to_this_machine_alone_unless_told(started):
    assert started().options["--server.address"] == "127.0.0.1"
    assert started("--address", "0.0.0.0").options["--server.address"] == "0.0.0.0"


def test_a_viewer_gets_no_traceback_and_uploads_nothing_large(started):
    options = started().options

    assert options["--client.showErrorDetails"] == "type"
    assert options["--server.maxUploadSize"] == "1"


@pytest.mark.parametrize("address", ["", " "])
def test_an_address_that_is_empty_is_not_taken_for_every_network(cli, measured, address):
    ran = cli("dashboard", "--address", address)

    assert ran.code == ExitCode.USAGE
    assert "--address is empty" in ran.error


def test_streamlit_s_protection_stays_on(started):
    options = started("--base-path", "/bench/").options

    assert options["--server.baseUrlPath"] == "bench"
    assert not any("xsrf" in name.lower() or "cors" in name.lower() for name in options)


def test_the_template_of_commits_goes_to_the_app(started):
    template = "https://example.org/c/{sha}"

    assert started("--commit-url", template).environment["FLEXQ_BENCH_COMMIT_URL"] == template
    assert "FLEXQ_BENCH_COMMIT_URL" not in started().environment


@pytest.mark.parametrize("template", ["javascript:alert('{sha}')", "https://example.org/c/"])
def test_a_template_that_is_no_web_address_of_a_commit_is_refused(database, cli, template):
    open_database(str(database)).close()

    ran = cli("dashboard", "--commit-url", template)

    assert ran.code == 2
    assert "https://github.com/OWNER/REPOSITORY/commit/{sha}" in ran.error


@pytest.mark.slow
def test_examples_have_a_database_of_their_own_that_goes_again(started, database, monkeypatch):
    """The whole of the records: half a minute on a busy machine."""
    before = database.read_bytes()
    seen: dict[str, Any] = {}

    def look(command: list[str], env: dict[str, str]) -> Any:
        path = Path(env["FLEXQ_BENCH_DB"])
        with open_database(str(path), read_only=True) as opened, opened.session() as session:
            gpus = queries.gpu_names(session)
            found = (gpus, queries.decoded_models(session), queries.scored_models(session))
        seen.update(path=path, found=found)
        return SimpleNamespace(returncode=0)

    started()
    monkeypatch.setattr("flexq_bench.cli.dashboard.subprocess.run", look)
    app(["dashboard", "--examples", "--port", "18766"], standalone_mode=False)

    gpus, decoded, scored = seen["found"]
    assert gpus[0] == "NVIDIA H200"
    assert decoded
    assert scored
    assert not seen["path"].exists()
    assert seen["path"] != database
    assert database.read_bytes() == before


def test_examples_beside_a_database_are_refused(cli):
    ran = cli("dashboard", "--examples", "--db", "mine.sqlite")

    assert ran.code == ExitCode.USAGE
    assert "leave --db out" in ran.error
