"""The guard of both servers against other sites: names, origins and headers."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from flexq_bench.read_api.browser_guard import DATA_POLICY, BrowserGuard, allowed_hosts

WIKI = "https://wiki.example.com"


async def _page(_):
    return PlainTextResponse("results")


async def _stream(websocket):
    await websocket.accept()
    await websocket.close()


@pytest.fixture
def client():
    """client(*names, address="127.0.0.1"): of a guarded server that these names may address."""

    def make(*names, address="127.0.0.1"):
        routes = [Route("/", _page), WebSocketRoute("/stream", _stream)]
        hosts = allowed_hosts(address, names)
        return TestClient(BrowserGuard(Starlette(routes=routes), hosts, DATA_POLICY, (WIKI,)))

    return make


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST.:8501",
        "127.0.0.1:8501",
        "[::1]:8501",
        "10.1.2.3",
        "bench.example.com",
    ],
)
def test_own_names_and_addresses_are_served(client, host):
    assert client("bench.example.com").get("/", headers={"host": host}).text == "results"


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "", "localhost@evil.example", "[::1", "a b"]
)
def test_other_names_are_refused(client, host):
    assert client().get("/", headers={"host": host}).status_code == 403


def test_page_of_another_site_may_not_read(client):
    headers = {"host": "127.0.0.1", "origin": "http://evil.example"}

    answer = client().get("/", headers=headers)

    assert answer.status_code == 403
    assert answer.json()["detail"].startswith("pages of 'http://evil.example' may not read this")
    assert "access-control-allow-origin" not in answer.headers


def test_named_origin_may_read(client):
    answer = client().get("/", headers={"host": "127.0.0.1", "origin": WIKI})

    assert answer.text == "results"
    assert answer.headers["access-control-allow-origin"] == WIKI
    assert answer.headers["vary"] == "Origin"


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example:8501", "http://evil.example:8501"),  # DNS rebinding
        ("localhost:8501", "http://evil.example"),
        ("localhost:8501", "null"),  # a page from a file, or in a sandbox
        ("localhost:8501", "http://[::1"),
    ],
)
def test_websocket_of_another_site_is_refused(client, host, origin):
    headers = {"host": host, "origin": origin}

    with pytest.raises(WebSocketDisconnect), client().websocket_connect("/stream", headers=headers):
        pass


def test_websocket_of_own_page_is_opened(client):
    headers = {"host": "bench.example.com", "origin": "https://bench.example.com"}

    with client("bench.example.com").websocket_connect("/stream", headers=headers):
        pass


def test_every_answer_has_the_headers_for_browsers(client):
    headers = client().get("/missing", headers={"host": "localhost"}).headers

    assert headers["content-security-policy"] == DATA_POLICY
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"


def test_public_server_may_be_addressed_by_its_own_name(client, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Bench-1")

    assert client(address="0.0.0.0").get("/", headers={"host": "bench-1"}).text == "results"
