"""The ASGI application of the read API: routes, ETags, and answers that are kept for seconds.

It opens the database for reading only, and has no route that takes anything but GET and HEAD.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from db.engine import Database
from db.errors import AmbiguousError, DatabaseError, NotFoundError
from flexq_bench.errors import FlexqError, UsageError
from flexq_bench.read_api.badge import badge_of
from flexq_bench.read_api.endpoints import ENDPOINTS, Endpoint, document

KEPT_S = 5.0  # an answer is computed once in this time, however many ask for it
_KEPT = 512  # answers
_JSON, _SVG = "application/json", "image/svg+xml"


@dataclass(frozen=True, slots=True)
class _Kept:
    until: float
    status: int
    body: bytes
    media_type: str
    etag: str


class _Answers:
    """Answers by address. Readers of one address wait for one computation, in a thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[_Kept]] = {}

    async def get(self, key: str, compute: Callable[[], tuple[int, bytes, str]]) -> _Kept:
        kept = self._kept.get(key)
        if kept is not None and time.monotonic() < kept.until:
            return kept
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._compute(key, compute))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        # A reader that goes away must not take the answer from the others.
        return await asyncio.shield(task)

    async def _compute(self, key: str, compute: Callable[[], tuple[int, bytes, str]]) -> _Kept:
        status, body, media_type = await run_in_threadpool(compute)
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        kept = _Kept(time.monotonic() + KEPT_S, status, body, media_type, etag)
        self._kept[key] = kept
        self._kept.move_to_end(key)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return kept


def api_app(database: Database, *, repository: Path | None = None) -> Starlette:
    """The application on a database that was opened for reading only.

    repository: a git tree in which the badge looks branches up; None: it takes commits alone.
    """
    answers = _Answers()

    async def answered(request: Request, compute: Callable[[], tuple[int, bytes, str]]) -> Response:
        # Sorted, so that two spellings of one question are one answer.
        query = "&".join(f"{k}={v}" for k, v in sorted(request.query_params.multi_items()))
        kept = await answers.get(f"{request.url.path}?{query}", compute)
        headers = {
            "ETag": kept.etag,
            "Cache-Control": f"public, max-age={KEPT_S:.0f}",
            "Access-Control-Allow-Origin": "*",
            "X-Content-Type-Options": "nosniff",
        }
        if kept.status == 200 and _matches(request.headers.get("if-none-match"), kept.etag):
            return Response(status_code=304, headers=headers)
        return Response(kept.body, kept.status, headers, kept.media_type)

    def json_route(one: Endpoint) -> Route:
        adapter: TypeAdapter[Any] = TypeAdapter(one.gives)

        async def endpoint(request: Request) -> Response:
            given = dict(request.query_params) | {
                name: str(value) for name, value in request.path_params.items()
            }

            def compute() -> tuple[int, bytes, str]:
                def answer() -> bytes:
                    asked = one.read(given)
                    with database.session() as session:
                        return adapter.dump_json(one.answer(session, asked))

                return _guarded(answer, _JSON)

            return await answered(request, compute)

        return Route(one.path, endpoint, methods=["GET"], name=one.name)

    async def badge(request: Request) -> Response:
        def compute() -> tuple[int, bytes, str]:
            def answer() -> bytes:
                with database.session() as session:
                    return badge_of(session, request.query_params.get("of"), repository).encode()

            return _guarded(answer, _SVG)

        return await answered(request, compute)

    async def openapi(request: Request) -> Response:
        return await answered(request, lambda: (200, json.dumps(document()).encode(), _JSON))

    return Starlette(
        routes=[
            *map(json_route, ENDPOINTS),
            Route("/badge.svg", badge, methods=["GET"]),
            Route("/openapi.json", openapi, methods=["GET"]),
        ],
        exception_handlers={404: _no_such_address, 405: _only_reading},
    )


def _guarded(answer: Callable[[], bytes], media_type: str) -> tuple[int, bytes, str]:
    """Status, body and type; an error that a reader can cause or wait out is one line of JSON."""
    try:
        return 200, answer(), media_type
    except NotFoundError as error:
        return 404, _error(str(error)), _JSON
    except (UsageError, AmbiguousError) as error:
        return 422, _error(str(error)), _JSON
    except DatabaseError as error:
        return 503, _error(str(error)), _JSON
    except FlexqError as error:
        return 404, _error(str(error)), _JSON


def _error(words: str) -> bytes:
    return json.dumps({"error": words}).encode()


def _matches(asked: str | None, etag: str) -> bool:
    given = [one.strip().removeprefix("W/") for one in (asked or "").split(",")]
    return etag in given or "*" in given


async def _no_such_address(request: Request, _: Exception) -> Response:
    words = f"no {request.url.path:.200} here: /openapi.json lists the addresses"
    return Response(_error(words), 404, media_type=_JSON)


async def _only_reading(request: Request, _: Exception) -> Response:
    words = "this API only reads: use GET"
    return Response(_error(words), 405, {"Allow": "GET, HEAD"}, _JSON)
