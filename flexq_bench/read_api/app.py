"""The ASGI application of the read API: routes, ETags, and answers that are kept while they hold.

It opens the database for reading only, and has no route that takes anything but GET and HEAD.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from db.engine import Database
from db.errors import AmbiguousError, DatabaseError, NotFoundError
from flexq_bench.errors import FlexqError, UsageError
from flexq_bench.read_api.badge import badge_of
from flexq_bench.read_api.endpoints import ENDPOINTS, Endpoint, document

KEPT_S = 5.0  # an answer is looked after no more often than this, however many ask for it
_KEPT, _KEPT_BYTES = 512, 64 << 20  # answers, and their bodies and addresses together
_JSON, _SVG = "application/json", "image/svg+xml"

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
_Key = tuple[str, bytes]  # path and query, apart: each may hold the other's `?`
_Content = tuple[int, bytes, str]  # status, body, media type


@dataclass(frozen=True, slots=True)
class _Kept:
    """version: of the database that it was computed from; None: that could not be told."""

    until: float
    version: int | None
    etag: str
    status: int
    body: bytes
    headers: Headers
    unchanged: Headers  # of the 304

    async def send_to(self, scope: Scope, send: Send) -> None:
        asked = next((v for k, v in scope["headers"] if k == b"if-none-match"), b"")
        same = self.status == 200 and _matches(asked.decode("latin-1"), self.etag)
        status, headers = (304, self.unchanged) if same else (self.status, self.headers)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if same else self.body})


class _Answers:
    """Answers by address. Readers of one address wait for one computation, in a thread.

    After KEPT_S an answer is computed anew, unless the database says that nobody wrote to it.
    """

    def __init__(self, version: Callable[[], int | None]) -> None:
        self._version = version
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._bytes = 0
        self._under_way: dict[_Key, asyncio.Task[_Kept]] = {}

    def fresh(self, key: _Key) -> _Kept | None:
        kept = self._kept.get(key)
        return kept if kept is not None and time.monotonic() < kept.until else None

    async def get(self, key: _Key, compute: Callable[[], _Content]) -> _Kept:
        kept = self.fresh(key)
        if kept is not None:
            return kept
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._compute(key, compute))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        # A reader that goes away must not take the answer from the others.
        return await asyncio.shield(task)

    async def _compute(self, key: _Key, compute: Callable[[], _Content]) -> _Kept:
        kept = await run_in_threadpool(self._current, self._kept.get(key), compute)
        old = self._kept.pop(key, None)
        self._bytes += _size(key, kept) - (0 if old is None else _size(key, old))
        self._kept[key] = kept
        while len(self._kept) > _KEPT or self._bytes > _KEPT_BYTES:
            self._bytes -= _size(*self._kept.popitem(last=False))
        return kept

    def _current(self, kept: _Kept | None, compute: Callable[[], _Content]) -> _Kept:
        """The old answer if it still holds, else a new one."""
        try:
            version = self._version()  # before reading: what is written meanwhile must be seen
        except DatabaseError:  # of which the answer tells
            version = None
        if kept is not None and kept.status != 503 and kept.version == version is not None:
            return replace(kept, until=time.monotonic() + KEPT_S)
        status, body, media_type = compute()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        unchanged = [
            (b"etag", etag.encode()),
            (b"cache-control", f"public, max-age={KEPT_S:.0f}".encode()),
            (b"access-control-allow-origin", b"*"),
            (b"x-content-type-options", b"nosniff"),
        ]
        headers = [
            *unchanged,
            (b"content-type", media_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        until = time.monotonic() + KEPT_S
        return _Kept(until, version, etag, status, body, headers, unchanged)


class _KeptFirst:
    """Sends an answer that is kept at once, past the routes: these cost more than the answer."""

    def __init__(self, answers: _Answers, routes: ASGIApp) -> None:
        self._answers, self._routes = answers, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            kept = self._answers.fresh(_key(scope))
            if kept is not None:
                await kept.send_to(scope, send)
                return
        await self._routes(scope, receive, send)


class _Answer:
    """Endpoint of a route: sends the cached answer of its address, or a new one."""

    def __init__(self, answers: _Answers, compute: Callable[[Request], _Content]) -> None:
        self._answers, self._compute = answers, compute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        kept = await self._answers.get(_key(scope), lambda: self._compute(request))
        await kept.send_to(scope, send)


def api_app(database: Database, *, repository: Path | None = None) -> ASGIApp:
    """The application on a database that was opened for reading only.

    repository: a git tree in which the badge looks branches up; None: it takes commits alone.
    """
    # A branch moves without a word in the database.
    answers = _Answers(database.version if repository is None else lambda: None)

    def json_route(one: Endpoint) -> Route:
        adapter: TypeAdapter[Any] = TypeAdapter(one.gives)

        def compute(request: Request) -> _Content:
            given = dict(request.query_params) | {
                name: str(value) for name, value in request.path_params.items()
            }

            def answer() -> bytes:
                asked = one.read(given)
                with database.session() as session:
                    return adapter.dump_json(one.answer(session, asked))

            return _guarded(answer, _JSON)

        return Route(one.path, _Answer(answers, compute), methods=["GET"], name=one.name)

    def badge(request: Request) -> _Content:
        def answer() -> bytes:
            with database.session() as session:
                return badge_of(session, request.query_params.get("of"), repository).encode()

        return _guarded(answer, _SVG)

    def openapi(request: Request) -> _Content:
        return 200, json.dumps(document()).encode(), _JSON

    routes = Starlette(
        routes=[
            *map(json_route, ENDPOINTS),
            Route("/badge.svg", _Answer(answers, badge), methods=["GET"]),
            Route("/openapi.json", _Answer(answers, openapi), methods=["GET"]),
        ],
        exception_handlers={404: _not_found, 405: _only_reading},
    )
    return _KeptFirst(answers, routes)


def _key(scope: Scope) -> _Key:
    return scope["path"], scope["query_string"]


def _size(key: _Key, kept: _Kept) -> int:
    """Bytes of an answer and of its address, which is as long as its reader likes."""
    return len(kept.body) + len(key[0]) + len(key[1])


def _guarded(answer: Callable[[], bytes], media_type: str) -> _Content:
    """Status, body and type; an error that a reader can cause or wait out is one line of JSON."""
    try:
        return 200, answer(), media_type
    except NotFoundError as error:
        return 404, _error(str(error)), _JSON
    except (UsageError, AmbiguousError) as error:
        return 422, _error(str(error)), _JSON
    except (DatabaseError, FlexqError) as error:
        # Its words name hosts, users and files of this machine, which are not the readers'.
        log.warning("%s", error)
        return 503, _error("the database can't be read now: try again later"), _JSON


def _error(words: str) -> bytes:
    return json.dumps({"error": words}).encode()


def _matches(asked: str, etag: str) -> bool:
    given = [one.strip().removeprefix("W/") for one in asked.split(",")]
    return etag in given or "*" in given


async def _not_found(request: Request, _: Exception) -> Response:
    words = f"no {request.url.path:.200} here: /openapi.json lists the addresses"
    return Response(_error(words), 404, media_type=_JSON)


async def _only_reading(request: Request, _: Exception) -> Response:
    words = "this API only reads: use GET"
    return Response(_error(words), 405, {"Allow": "GET, HEAD"}, _JSON)
