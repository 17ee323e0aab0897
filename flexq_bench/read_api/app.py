"""ASGI application of the read API: routes, ETags, compression, and a cache of responses.

The database is opened read-only, and all routes of this module accept only GET and HEAD.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexq_bench.db import queries
from flexq_bench.db.decisions import OPEN_STATES
from flexq_bench.db.engine import Database
from flexq_bench.db.errors import AmbiguousError, DatabaseError, NotFoundError
from flexq_bench.errors import FlexqError, UsageError
from flexq_bench.read_api.docs_page import docs_page
from flexq_bench.read_api.endpoints import ENDPOINTS, JSON, Endpoint, document
from flexq_bench.read_api.problems import PROBLEM, problem
from flexq_bench.read_api.request_metrics import TEXT, RequestMetrics
from flexq_bench.read_api.responses import Source
from flexq_bench.read_api.run_counts import RunCountsCache

CACHE_S = 5.0  # minimum time between two validations of a cached response
ALLOWED = "GET, HEAD, OPTIONS"
_MAX_CACHED_RESPONSES, _MAX_CACHED_BYTES = 512, 64 << 20  # responses; their bodies and URLs
_HTML = "text/html; charset=utf-8"
_MIN_COMPRESSED_BYTES, _COMPRESSION_LEVEL = 1024, 4
_ROUTE = "flexq_bench.route"  # in a scope: the path of its route, for metrics

log = logging.getLogger(__name__)

_Key = tuple[str, bytes]  # path and query; joined they could be ambiguous
_Content = tuple[int, bytes, str]  # status, body, media type


@dataclass(frozen=True, slots=True)
class _Response:
    """A cached response. version: of the database it was computed from; None: unknown."""

    route: str
    until: float
    version: int | None
    etag: str
    status: int
    body: bytes
    media_type: str
    compressed: list[bytes] = field(default_factory=list)  # filled by the first request for it

    async def send_to(self, scope: Scope, send: Send) -> None:
        scope[_ROUTE] = self.route
        given = {name: value.decode("latin-1") for name, value in scope["headers"]}
        body, etag, encoding = self.body, self.etag, []
        if len(body) >= _MIN_COMPRESSED_BYTES and _accepts_gzip(given.get(b"accept-encoding", "")):
            if not self.compressed:
                packed = await run_in_threadpool(gzip.compress, body, _COMPRESSION_LEVEL, mtime=0)
                self.compressed.append(packed)
            body = self.compressed[0]
            etag, encoding = f"W/{etag}", [(b"content-encoding", b"gzip")]
        headers = [
            (b"etag", etag.encode()),
            (b"cache-control", f"public, max-age={CACHE_S:.0f}".encode()),
            (b"vary", b"Accept-Encoding"),
        ]
        status = self.status
        if status == 200 and _matches(given.get(b"if-none-match", ""), self.etag):
            status, body = 304, b""
        else:
            headers += [
                *encoding,
                (b"content-type", self.media_type.encode()),
                (b"content-length", str(len(body)).encode()),
            ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


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

    async def get(self, key: _Key, route: str, compute: Callable[[], _Content]) -> _Response:
        cached = self.fresh(key)
        if cached is not None:
            return cached
        task = self._pending.get(key)
        if task is None:
            task = asyncio.create_task(self._compute(key, route, compute))
            self._pending[key] = task
            task.add_done_callback(lambda _: self._pending.pop(key, None))
        # A client that disconnects must not cancel the computation for the others.
        return await asyncio.shield(task)

    async def _compute(self, key: _Key, route: str, compute: Callable[[], _Content]) -> _Response:
        known = self._responses.get(key)
        cached = await run_in_threadpool(self._current, known, route, compute)
        old = self._responses.pop(key, None)
        self._bytes += _size(key, cached) - (0 if old is None else _size(key, old))
        self._responses[key] = cached
        while len(self._responses) > _MAX_CACHED_RESPONSES or self._bytes > _MAX_CACHED_BYTES:
            self._bytes -= _size(*self._responses.popitem(last=False))
        return cached

    def _current(
        self, cached: _Response | None, route: str, compute: Callable[[], _Content]
    ) -> _Response:
        """Return the cached response if it is still valid, else a new one."""
        try:
            version = self._version()  # before reading, so that concurrent writes invalidate it
        except DatabaseError:  # reported by the response
            version = None
        if cached is not None and cached.status != 503 and cached.version == version is not None:
            return replace(cached, until=time.monotonic() + CACHE_S)
        status, body, media_type = compute()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        until = time.monotonic() + CACHE_S
        return _Response(route, until, version, etag, status, body, media_type)


class _Middleware:
    """Sends a cached response before routing, which costs more than sending it; counts requests."""

    def __init__(self, cache: _Cache, metrics: RequestMetrics, routes: ASGIApp) -> None:
        self._cache, self._metrics, self._routes = cache, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._routes(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._respond(scope, receive, counted)
        finally:
            route = scope.get(_ROUTE, "other")
            method = scope["method"] if status != 405 else "other"
            self._metrics.add(route, method, status, time.perf_counter() - start)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS":
            await Response(None, 204, {"Allow": ALLOWED})(scope, receive, send)
            return
        if scope["method"] in ("GET", "HEAD"):
            cached = self._cache.fresh(_key(scope))
            if cached is not None:
                await cached.send_to(scope, send)
                return
        await self._routes(scope, receive, send)


class _CachedEndpoint:
    """Endpoint of a route: sends the cached response of its URL, or a new one."""

    def __init__(self, cache: _Cache, route: str, compute: Callable[[Request], _Content]) -> None:
        self._cache, self._route, self._compute = cache, route, compute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        cached = await self._cache.get(_key(scope), self._route, lambda: self._compute(request))
        await cached.send_to(scope, send)


def api_app(
    database: Database,
    *,
    repository: Path | None = None,
    further: Sequence[BaseRoute] = (),
    described: Mapping[str, Any] | None = None,
) -> ASGIApp:
    """Return the application for a database opened read-only.

    repository: git tree for branch names of badges; None: badges only of commits. further: routes
    that accept other methods; described: their paths in the OpenAPI document.
    """
    # A branch moves without a change in the database: responses are then never revalidated.
    cache = _Cache(database.version if repository is None else lambda: None)
    metrics = RequestMetrics()
    count_runs = RunCountsCache()
    openapi = {**document(), "paths": {**document()["paths"], **(described or {})}}

    def route_of(endpoint: Endpoint) -> Route:
        adapter: TypeAdapter[Any] = TypeAdapter(endpoint.response_type)

        def compute(request: Request) -> _Content:
            path = ((name, str(value)) for name, value in request.path_params.items())

            def answer() -> bytes:
                parameters = endpoint.read([*path, *request.query_params.multi_items()])
                with database.session() as session:
                    source = Source(session, repository, count_runs)
                    content = endpoint.respond(source, parameters)
                    is_json = endpoint.media_type == JSON
                    return adapter.dump_json(content) if is_json else str(content).encode()

            return _guarded(answer, endpoint.media_type)

        return fixed(endpoint.path, compute)

    def fixed(path: str, compute: Callable[[Request], _Content]) -> Route:
        return Route(path, _CachedEndpoint(cache, path, compute), methods=["GET"])

    def gauges_of_database() -> dict[str, tuple[str, float]]:
        gauges = {"flexq_database_up": ("Whether the database answers.", 1.0)}
        try:
            with database.session() as session:
                alerts = queries.count_alerts(session, states=OPEN_STATES)
                newest = queries.newest_result_at(session)
        except DatabaseError as error:
            log.warning("%s", error)
            gauges["flexq_database_up"] = ("Whether the database answers.", 0.0)
        else:
            gauges["flexq_open_alerts"] = ("Open alerts.", float(alerts))
            if newest is not None:
                meaning = "Time of the newest result, in Unix time."
                gauges["flexq_newest_result_seconds"] = (meaning, newest.timestamp())
        return gauges

    async def measured(request: Request) -> Response:
        request.scope[_ROUTE] = "/metrics"
        gauges = await run_in_threadpool(gauges_of_database)
        return Response(metrics.text(gauges), headers={"content-type": TEXT})

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        threading.Thread(target=count_first_runs, daemon=True).start()
        yield

    def count_first_runs() -> None:
        try:
            count_runs.fill(database)
        except DatabaseError as error:
            log.warning("%s", error)

    routes = Starlette(
        lifespan=lifespan,
        routes=[
            *map(route_of, ENDPOINTS),
            fixed("/openapi.json", lambda _: (200, json.dumps(openapi).encode(), JSON)),
            fixed("/docs", lambda _: (200, docs_page(openapi).encode(), _HTML)),
            Route("/", lambda _: RedirectResponse("docs"), methods=["GET"]),
            Route("/metrics", measured, methods=["GET"]),
            *further,
        ],
        exception_handlers={404: _not_found, 405: _method_not_allowed, 500: _failed},
    )
    return _Middleware(cache, metrics, routes)


def _key(scope: Scope) -> _Key:
    return scope["path"], scope["query_string"]


def _size(key: _Key, cached: _Response) -> int:
    """Return the bytes of a response, plain and compressed, and of its URL."""
    return 2 * len(cached.body) + len(key[0]) + len(key[1])


def _guarded(answer: Callable[[], bytes], media_type: str) -> _Content:
    """Return status, body and media type; known errors become a problem document (RFC 9457)."""
    try:
        return 200, answer(), media_type
    except NotFoundError as error:
        return 404, problem(404, str(error)), PROBLEM
    except (UsageError, AmbiguousError) as error:
        return 422, problem(422, str(error)), PROBLEM
    except (DatabaseError, FlexqError) as error:
        # The message may contain hosts, users and files of this machine: log it only.
        log.warning("%s", error)
        return 503, problem(503, "the database can't be read now: try again later"), PROBLEM


def _matches(if_none_match: str, etag: str) -> bool:
    etags = [text.strip().removeprefix("W/") for text in if_none_match.split(",")]
    return etag in etags or "*" in etags


def _accepts_gzip(accept_encoding: str) -> bool:
    accepted = (coding.replace(" ", "").lower() for coding in accept_encoding.split(","))
    return any(c == "gzip" or (c.startswith("gzip;q=") and c[7:].strip("0.")) for c in accepted)


async def _not_found(request: Request, _: Exception) -> Response:
    message = f"no {request.url.path:.200} here: /openapi.json lists the addresses"
    return Response(problem(404, message), 404, media_type=PROBLEM)


async def _method_not_allowed(request: Request, error: Exception) -> Response:
    named: str = (getattr(error, "headers", None) or {}).get("Allow", "")
    allowed = ", ".join(sorted({"OPTIONS", *filter(None, named.split(", "))}))
    message = f"this address takes {allowed}"
    return Response(problem(405, message), 405, {"Allow": allowed}, PROBLEM)


async def _failed(request: Request, _: Exception) -> Response:
    message = "an error of this server: its log has it"
    return Response(problem(500, message), 500, media_type=PROBLEM)
