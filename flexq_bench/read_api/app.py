"""ASGI application of the read API: routes, ETags, and a cache of responses.

The database is opened read-only, and all routes accept only GET and HEAD.
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

from flexq_bench.db.engine import Database
from flexq_bench.db.errors import AmbiguousError, DatabaseError, NotFoundError
from flexq_bench.errors import FlexqError, UsageError
from flexq_bench.read_api.badge import badge_of
from flexq_bench.read_api.endpoints import ENDPOINTS, Endpoint, document

CACHE_S = 5.0  # minimum time between two validations of a cached response
_MAX_CACHED_RESPONSES, _MAX_CACHED_BYTES = 512, 64 << 20  # responses; their bodies and URLs
_JSON, _SVG = "application/json", "image/svg+xml"

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
_Key = tuple[str, bytes]  # path and query; joined they could be ambiguous
_Content = tuple[int, bytes, str]  # status, body, media type


@dataclass(frozen=True, slots=True)
class _Response:
    """A cached response. version: of the database it was computed from; None: unknown."""

    until: float
    version: int | None
    etag: str
    status: int
    body: bytes
    headers: Headers
    unchanged: Headers  # of a 304 response

    async def send_to(self, scope: Scope, send: Send) -> None:
        if_none_match = next((v for k, v in scope["headers"] if k == b"if-none-match"), b"")
        same = self.status == 200 and _matches(if_none_match.decode("latin-1"), self.etag)
        status, headers = (304, self.unchanged) if same else (self.status, self.headers)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if same else self.body})


class _Cache:
    """Cache of responses by URL. Concurrent requests of one URL share one computation, in a thread.

    After CACHE_S a response is computed again, unless the database's version is unchanged.
    """

    def __init__(self, version: Callable[[], int | None]) -> None:
        self._version = version
        self._responses: OrderedDict[_Key, _Response] = OrderedDict()
        self._bytes = 0
        self._pending: dict[_Key, asyncio.Task[_Response]] = {}

    def fresh(self, key: _Key) -> _Response | None:
        cached = self._responses.get(key)
        return cached if cached is not None and time.monotonic() < cached.until else None

    async def get(self, key: _Key, compute: Callable[[], _Content]) -> _Response:
        cached = self.fresh(key)
        if cached is not None:
            return cached
        task = self._pending.get(key)
        if task is None:
            task = asyncio.create_task(self._compute(key, compute))
            self._pending[key] = task
            task.add_done_callback(lambda _: self._pending.pop(key, None))
        # A client that disconnects must not cancel the computation for the others.
        return await asyncio.shield(task)

    async def _compute(self, key: _Key, compute: Callable[[], _Content]) -> _Response:
        cached = await run_in_threadpool(self._current, self._responses.get(key), compute)
        old = self._responses.pop(key, None)
        self._bytes += _size(key, cached) - (0 if old is None else _size(key, old))
        self._responses[key] = cached
        while len(self._responses) > _MAX_CACHED_RESPONSES or self._bytes > _MAX_CACHED_BYTES:
            self._bytes -= _size(*self._responses.popitem(last=False))
        return cached

    def _current(self, cached: _Response | None, compute: Callable[[], _Content]) -> _Response:
        """Return the cached response if it is still valid, else a new one."""
        try:
            version = self._version()  # before reading, so that concurrent writes invalidate it
        except DatabaseError:  # reported by the response
            version = None
        if cached is not None and cached.status != 503 and cached.version == version is not None:
            return replace(cached, until=time.monotonic() + CACHE_S)
        status, body, media_type = compute()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        unchanged = [
            (b"etag", etag.encode()),
            (b"cache-control", f"public, max-age={CACHE_S:.0f}".encode()),
        ]
        headers = [
            *unchanged,
            (b"content-type", media_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        until = time.monotonic() + CACHE_S
        return _Response(until, version, etag, status, body, headers, unchanged)


class _CacheMiddleware:
    """Middleware that sends a cached response before routing, which costs more than sending it."""

    def __init__(self, cache: _Cache, routes: ASGIApp) -> None:
        self._cache, self._routes = cache, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            cached = self._cache.fresh(_key(scope))
            if cached is not None:
                await cached.send_to(scope, send)
                return
        await self._routes(scope, receive, send)


class _CachedEndpoint:
    """Endpoint of a route: sends the cached response of its URL, or a new one."""

    def __init__(self, cache: _Cache, compute: Callable[[Request], _Content]) -> None:
        self._cache, self._compute = cache, compute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        cached = await self._cache.get(_key(scope), lambda: self._compute(request))
        await cached.send_to(scope, send)


def api_app(database: Database, *, repository: Path | None = None) -> ASGIApp:
    """Return the application for a database opened read-only.

    repository: git tree for branch names of badges; None: badges only of commits.
    """
    # A branch moves without a change in the database: responses are then never revalidated.
    cache = _Cache(database.version if repository is None else lambda: None)

    def json_route(endpoint: Endpoint) -> Route:
        adapter: TypeAdapter[Any] = TypeAdapter(endpoint.response_type)

        def compute(request: Request) -> _Content:
            query = dict(request.query_params) | {
                name: str(value) for name, value in request.path_params.items()
            }

            def answer() -> bytes:
                parameters = endpoint.read(query)
                with database.session() as session:
                    return adapter.dump_json(endpoint.respond(session, parameters))

            return _guarded(answer, _JSON)

        handler = _CachedEndpoint(cache, compute)
        return Route(endpoint.path, handler, methods=["GET"], name=endpoint.name)

    def badge(request: Request) -> _Content:
        def answer() -> bytes:
            with database.session() as session:
                revision, project = map(request.query_params.get, ("of", "project"))
                return badge_of(session, revision, repository, project=project or "").encode()

        return _guarded(answer, _SVG)

    def openapi(request: Request) -> _Content:
        return 200, json.dumps(document()).encode(), _JSON

    routes = Starlette(
        routes=[
            *map(json_route, ENDPOINTS),
            Route("/badge.svg", _CachedEndpoint(cache, badge), methods=["GET"]),
            Route("/openapi.json", _CachedEndpoint(cache, openapi), methods=["GET"]),
        ],
        exception_handlers={404: _not_found, 405: _method_not_allowed},
    )
    return _CacheMiddleware(cache, routes)


def _key(scope: Scope) -> _Key:
    return scope["path"], scope["query_string"]


def _size(key: _Key, cached: _Response) -> int:
    """Return the bytes of a response and of its URL, whose length the client chooses."""
    return len(cached.body) + len(key[0]) + len(key[1])


def _guarded(answer: Callable[[], bytes], media_type: str) -> _Content:
    """Return status, body and media type; known errors become one line of JSON."""
    try:
        return 200, answer(), media_type
    except NotFoundError as error:
        return 404, _error(str(error)), _JSON
    except (UsageError, AmbiguousError) as error:
        return 422, _error(str(error)), _JSON
    except (DatabaseError, FlexqError) as error:
        # The message may contain hosts, users and files of this machine: log it only.
        log.warning("%s", error)
        return 503, _error("the database can't be read now: try again later"), _JSON


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()


def _matches(if_none_match: str, etag: str) -> bool:
    etags = [text.strip().removeprefix("W/") for text in if_none_match.split(",")]
    return etag in etags or "*" in etags


async def _not_found(request: Request, _: Exception) -> Response:
    message = f"no {request.url.path:.200} here: /openapi.json lists the addresses"
    return Response(_error(message), 404, media_type=_JSON)


async def _method_not_allowed(request: Request, _: Exception) -> Response:
    message = "this API only reads: use GET"
    return Response(_error(message), 405, {"Allow": "GET, HEAD"}, _JSON)
