"""The API's application on a database, asked without a network."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "dashboard"))
sys.path.insert(0, str(Path(__file__).parent))

from made_results import H200, records_of

from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import import_file, write_records
from flexq_bench.db.records import DeviceInfo
from flexq_bench.read_api.app import api_app
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts.nightly import record_night


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@pytest.fixture(scope="session")
def with_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write_records(folder / "some.jsonl", records_of())
    with open_database(str(folder / "api.sqlite")) as database, database.session() as session:
        import_file(session, folder / "some.jsonl")
    return folder / "api.sqlite"


@pytest.fixture(scope="session")
def with_alert(with_results: Path, compared: Any, commits: Any) -> Path:
    path = with_results.with_name("alert.sqlite")
    shutil.copy(with_results, path)
    machine = Machine("cpu", DeviceInfo("GPU-1", H200, "cpu"))
    with open_database(str(path)) as database, database.session() as session:
        slow = compared("flexq-w6a6", 1.05, base=3, head=6)
        record_night(session, [slow], machine, commits, alerting=True)
    return path


@pytest.fixture
def path(tmp_path: Path, with_results: Path) -> Path:
    """A database with two kernels on two layers, at M = 1 and 8."""
    return Path(shutil.copy(with_results, tmp_path / "api.sqlite"))


@pytest.fixture
def slower(path: Path, with_alert: Path) -> Path:
    """The same with an alert: flexq-w6a6 is 5 % slower at commit 6."""
    return Path(shutil.copy(with_alert, path))


@pytest.fixture
def ask(path: Path) -> Iterator[Callable[..., Answer]]:
    """ask("/v1/runs", method="GET", **headers): as a reader of the network would."""
    with open_database(str(path), read_only=True) as database:
        app = api_app(database)

        def asked(target: str, *, method: str = "GET", **headers: str) -> Answer:
            return asyncio.run(_ask(app, method, target, headers))

        yield asked


async def _ask(app: Any, method: str, target: str, headers: dict[str, str]) -> Answer:
    file, _, query = target.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": unquote(file),
        "raw_path": file.encode(),
        "query_string": query.encode(),
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
        "server": ("test", 80),
        "scheme": "http",
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start = sent[0]
    found = {k.decode(): v.decode() for k, v in start["headers"]}
    body = b"".join(part.get("body", b"") for part in sent[1:])
    return Answer(start["status"], found, body)
