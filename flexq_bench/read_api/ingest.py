"""Ingest API: results of other processes and machines by POST, under tokens of their projects.

A request is answered after its results are committed, so that an acknowledged one is stored.
Results have identities (flexq_bench/exchange/external/records.py), so that repeating a request
after a lost answer changes nothing; with an `Idempotency-Key` it gets the first answer again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from flexq_bench.db import tokens
from flexq_bench.db.engine import Database
from flexq_bench.db.errors import ConflictError, DatabaseError, NotFoundError, RecordError
from flexq_bench.db.exchange import import_file, read_records
from flexq_bench.db.gzip_files import DAMAGED, unpacked
from flexq_bench.db.store import projects_of_stored
from flexq_bench.errors import FlexqError, UsageError
from flexq_bench.exchange.external.formats import FORMATS, detect_format, read_results
from flexq_bench.exchange.external.importing import Imported, full_commits, store_readings
from flexq_bench.exchange.external.records import Origin
from flexq_bench.exchange.external.result import commit_of
from flexq_bench.read_api.endpoints import JSON, Parameter, read_parameters
from flexq_bench.read_api.problems import PROBLEM, problem
from flexq_bench.results.paired_questions import paired_verdicts

OWN_PROJECT = "flexq-bench"  # name of this repository, whose results have no project
RECORDS = "records"  # format of `run --json` and `db export`
_RECORDS_FILE = "records.jsonl"
_AUTO = "auto"
_RESULTS = "/v1/results"
_MAX_SILENCE_S = 30.0  # while a content is received
_MAX_LISTED = 100  # refused results in an answer
_MAX_PAGE = 1000
_MAX_DAYS = 3650
_MAX_GRACE_H = 24 * 30
_AT_ONCE = 2  # requests of a token; further ones are not read yet
_MAX_OBJECT = 1 << 14  # bytes of a request about tokens
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,99}$"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_KEY = re.compile(r"[\x21-\x7e]{1,200}")

log = logging.getLogger(__name__)

_MINUTE = timedelta(minutes=1)
Judge = Callable[[Collection[int]], Mapping[str, Any]]


class _Refusal(Exception):  # noqa: N818 (a response)
    """A request that is answered with a problem document."""

    def __init__(self, status: int, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests. per_minute: of one token; max_bytes: of one content."""

    max_bytes: int = 64 << 20
    per_minute: int = 120


@dataclass(slots=True)
class _Rate:
    """Times of the requests of each token in the last minute, here; others are in the audit."""

    per_minute: int
    _times: dict[int, deque[float]] = field(default_factory=dict)

    def count(self, token: int, stored: int) -> None:
        """Count a request. stored: by all servers. Raises _Refusal if there were too many."""
        now = time.monotonic()
        times = self._times.setdefault(token, deque())
        while times and times[0] < now - 60:
            times.popleft()
        if max(len(times), stored) >= self.per_minute:
            wait = f"{60 - (now - times[0]) if times else 60:.0f}"
            raise _Refusal(
                429,
                f"over {self.per_minute} requests a minute: wait {wait} s",
                **{"Retry-After": wait},
            )
        times.append(now)


_PROJECT = Parameter("project", "of the token")
_ORIGIN = (
    Parameter("commit", "of results that name none", pattern="^([0-9a-fA-F]{7,64})?$"),
    Parameter("branch", "of results that name none"),
    Parameter("device", "of the results; default: the one in the file"),
    Parameter("time", "of the results; default: the one in the file, else now", datetime),
    Parameter("occasion", "id of the run; another one is a further measurement of a commit"),
)
_FORMAT = Parameter("format", "default: auto, by the content", choices=(_AUTO, RECORDS, *FORMATS))
_ID = Parameter("id", "of the token", int, in_path=True, least=1)
_KEY_HEADER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "a repeated request with this key gets the first answer",
    "schema": {"type": "string", "pattern": "^[!-~]{1,200}$"},
}
_REFUSALS = {
    400: "the content was cut off or is damaged",
    401: "no valid token",
    403: "a token of another project, or without this right",
    404: "not stored",
    413: "the content is too large",
    415: "an unknown Content-Encoding",
    422: "an invalid parameter or content",
    429: "too many requests: repeat it after the seconds of Retry-After",
    503: "the database can't be written now: repeat it",
}


@dataclass(frozen=True, slots=True)
class _Operation:
    """A method of a path. right: that its token needs. name: in the OpenAPI document."""

    method: str
    path: str
    right: str
    name: str
    respond: Callable[[_Call], Mapping[str, Any]]
    description: str
    own_parameters: tuple[Parameter, ...] = ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.own_parameters, _PROJECT)

    def described(self) -> dict[str, Any]:
        """Return the operation object of the OpenAPI document."""
        refusal = {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}}
        answer = {JSON: {"schema": {"type": "object"}}}
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        is_upload = self.path == _RESULTS
        return {
            "operationId": self.name,
            "summary": self.description,
            "security": [{"token": []}],
            "parameters": [
                *(parameter.described() for parameter in self.parameters),
                *([_KEY_HEADER] if is_upload else []),
            ],
            **({"requestBody": {"required": True, "content": content}} if is_upload else {}),
            "responses": {
                "200": {"description": self.description, "content": answer},
                **{
                    str(status): {"description": reason, "content": refusal}
                    for status, reason in _REFUSALS.items()
                },
            },
        }


class Ingest:
    """Routes that write to a database opened for writing.

    judge: judges the series with these ids, and returns what came of it for the answer.
    """

    def __init__(self, database: Database, judge: Judge, limits: Limits | None = None) -> None:
        self._database, self._judge = database, judge
        self._limits = limits or Limits()
        self._rate = _Rate(self._limits.per_minute)
        # One import at a time: they would wait for each other anyway. Those that wait hold neither
        # a thread, which readers need, nor more contents of a token than these.
        self._turn = asyncio.Semaphore(1)
        self._received = defaultdict[int, asyncio.Semaphore](partial(asyncio.Semaphore, _AT_ONCE))
        self._operations = (
            _Operation(
                *("POST", _RESULTS, "write", "postResults", self._store),
                "store results, of a file that is the content",
                (*_ORIGIN, _FORMAT, Parameter("filename", "of the content, if it says something")),
            ),
            _Operation(
                *("GET", "/v1/requests", "read", "listRequests", self._audit),
                "requests of the project's tokens, and their answers, newest first",
                (
                    Parameter("limit", "maximum number of rows", int, least=1, most=_MAX_PAGE),
                    Parameter("before", "latest time, exclusive", datetime),
                ),
            ),
            _Operation(
                *("GET", "/v1/tokens", "admin", "listTokens", self._list_tokens),
                "the project's valid tokens, without their secrets",
            ),
            _Operation(
                *("POST", "/v1/tokens", "admin", "createToken", self._create_token),
                "a new token of the project; the answer alone has its secret",
                (
                    Parameter("name", "of its bearer", required=True, pattern=_NAME),
                    Parameter("rights", "default: write", choices=tokens.RIGHTS),
                    Parameter("days", "until it expires; default: 90", int, most=_MAX_DAYS),
                ),
            ),
            _Operation(
                *("POST", "/v1/tokens/{id}/rotate", "admin", "rotateToken", self._rotate_token),
                "a new secret of a token; the old one is valid for some hours",
                (_ID, Parameter("grace_hours", "default: 24", int, most=_MAX_GRACE_H)),
            ),
            _Operation(
                *("DELETE", "/v1/tokens/{id}", "admin", "revokeToken", self._revoke_token),
                "revoke a token",
                (_ID,),
            ),
        )

    def routes(self) -> list[Route]:
        """Return the routes, for `flexq_bench.read_api.app.api_app`."""
        by_path: dict[str, dict[str, _Operation]] = {}
        for operation in self._operations:
            by_path.setdefault(operation.path, {})[operation.method] = operation
        return [self._route(path, operations) for path, operations in by_path.items()]

    def described(self) -> dict[str, Any]:
        """Return the paths of the routes in the OpenAPI document."""
        paths: dict[str, Any] = {}
        for operation in self._operations:
            paths.setdefault(operation.path, {})[operation.method.lower()] = operation.described()
        return paths

    def _route(self, path: str, operations: Mapping[str, _Operation]) -> Route:
        most = self._limits.max_bytes if path == _RESULTS else _MAX_OBJECT

        async def answered(request: Request) -> Response:
            operation = operations["GET" if request.method == "HEAD" else request.method]
            request.scope["flexq_bench.route"] = path
            try:
                token = await run_in_threadpool(self._bearer, request, operation.right)
                async with self._received[token.id]:
                    with tempfile.TemporaryDirectory(prefix="flexq-ingest-") as folder:
                        # Two levels: readers look for other files of a tool in the folder above.
                        inner = Path(folder) / "content"
                        inner.mkdir()
                        call = await _received(request, token, inner / _file_name(request), most)
                        async with nullcontext() if call.is_safe else self._turn:
                            return await run_in_threadpool(self._answer, call, operation)
            except _Refusal as error:
                return _refused(error)
            except ClientDisconnect:
                return _refused(_Refusal(400, "the request was cut off"))
            except DatabaseError as error:
                log.warning("%s", error)
                wait = {"Retry-After": "5"}
                return _refused(_Refusal(503, "the database can't be written now", **wait))

        return Route(path, answered, methods=list(operations))

    def _bearer(self, request: Request, right: str) -> tokens.Token:
        """Return the token of a request. Raises _Refusal unless it has this right here."""
        kind, _, secret = request.headers.get("authorization", "").partition(" ")
        now = datetime.now(UTC)
        with self._database.session() as session:
            token = tokens.token_of(session, secret.strip(), now)
            stored = (
                0 if token is None else tokens.count_entries(session, token, since=now - _MINUTE)
            )
        if kind.lower() != "bearer" or token is None:
            raise _Refusal(
                401, "give a valid token: Authorization: Bearer …", **{"WWW-Authenticate": "Bearer"}
            )
        self._rate.count(token.id, stored)
        named = request.query_params.get("project")
        if named is not None and _stored_name(named) != token.project:
            self._note(request, token, 403, "another project")
            raise _Refusal(403, f"this token is not of project {named!r:.110}")
        if not token.may(right):
            self._note(request, token, 403, f"needs {right}")
            raise _Refusal(
                403, f"this token may {token.rights}; this needs a token that may {right}"
            )
        return token

    def _note(self, request: Request, token: tokens.Token, status: int, why: str) -> None:
        entry = tokens.AuditEntry(
            project=token.project,
            action=f"{request.method} {request.url.path}"[:100],
            status=status,
            created_at=datetime.now(UTC),
            answer={"detail": why, "asked": request.query_params.get("project", "")[:100]},
            token_id=token.id,
            client=request.client.host if request.client else "",
        )
        with self._database.session() as session:
            tokens.add_entry(session, entry)

    def _answer(self, call: _Call, operation: _Operation) -> Response:
        """Respond, and store the answer in the audit before it is given."""
        if call.key is not None:
            with self._database.session() as session:
                first = tokens.entry_of_key(session, call.token.project, call.key)
            if first is not None:
                return _repeated(call, first)
        status = 200
        try:
            call = replace(call, parameters=read_parameters(operation.parameters, call.query))
            answer = dict(operation.respond(call))
        except NotFoundError as error:
            status, answer = 404, {"detail": str(error)}
        except _Refusal as error:
            status, answer = error.status, {"detail": error.detail}
        except (FlexqError, RecordError, ConflictError) as error:
            status, answer = 422, {"detail": call.without_path(str(error))}
        if call.is_safe:
            return _json(status, answer)
        secret = answer.pop("secret", None)  # is given once, and stored nowhere
        entry = tokens.AuditEntry(
            project=call.token.project,
            action=call.action,
            status=status,
            created_at=datetime.now(UTC),
            answer=answer,
            token_id=call.token.id,
            idempotency_key=call.key if status == 200 and secret is None else None,
            content_hash=call.content_hash,
            content_bytes=call.content_bytes,
            client=call.client,
        )
        with self._database.session() as session:
            first = tokens.add_entry(session, entry)
        if first is not None:  # of a request that came at the same time
            return _repeated(call, first)
        return _json(status, answer | ({} if secret is None else {"secret": secret}))

    def _store(self, call: _Call) -> dict[str, Any]:
        format_name = call.parameters.get("format", _AUTO)
        if format_name == RECORDS:
            return self._store_records(call)
        if not call.token.project:
            raise UsageError(f"results of {OWN_PROJECT} are records: give format={RECORDS}")
        path = str(call.path)
        name = detect_format(path) if format_name == _AUTO else format_name
        done = store_readings(
            self._database,
            read_results(name, path),
            _origin(call),
            lambda commits: full_commits(self._database, call.token.project, commits),
        )
        if not done.read and not done.refused:
            raise UsageError("it has no results: did its tool run? Nothing was stored")
        paired: list[str] = []
        if done.has_questions:
            with self._database.session() as session:
                paired = [verdict.text for verdict in paired_verdicts(session, done.series)]
        return {"format": name, **_counts(done), "paired": paired, **self._judge(done.series)}

    def _store_records(self, call: _Call) -> dict[str, Any]:
        path = call.path.rename(call.path.with_name(_RECORDS_FILE))
        with self._database.session() as session:
            # Identities that others have stored would change their rows.
            if projects_of_stored(session, read_records(path)) - {call.token.project}:
                raise _Refusal(403, "some of the records belong to another project")
            summary = import_file(session, path)
        return {
            "format": RECORDS,
            "read": summary.read,
            "added": summary.added,
            "runs": summary.runs,
        }

    def _audit(self, call: _Call) -> dict[str, Any]:
        of_page = {"limit": call.parameters.get("limit", 100)}
        of_page["before"] = call.parameters.get("before")
        with self._database.session() as session:
            entries = tokens.audit_entries(session, call.token.project, **of_page)
        return {"requests": [_plain(asdict(entry)) for entry in entries]}

    def _list_tokens(self, call: _Call) -> dict[str, Any]:
        with self._database.session() as session:
            valid = tokens.valid_tokens(session, call.token.project, datetime.now(UTC))
        return {"tokens": [_plain(asdict(token)) for token in valid]}

    def _create_token(self, call: _Call) -> dict[str, Any]:
        name, rights = call.parameters["name"], call.parameters.get("rights", "write")
        now = datetime.now(UTC)
        expires_at = now + timedelta(days=call.parameters.get("days", 90))
        with self._database.session() as session:
            token, secret = tokens.create_token(
                session, call.token.project, name, rights, at=now, expires_at=expires_at
            )
        return {"token": _plain(asdict(token)), "secret": secret}

    def _rotate_token(self, call: _Call) -> dict[str, Any]:
        grace = timedelta(hours=call.parameters.get("grace_hours", 24))
        with self._database.session() as session:
            rotated = session, call.token.project, call.parameters["id"]
            token, secret = tokens.rotate_token(*rotated, at=datetime.now(UTC), grace=grace)
        return {"token": _plain(asdict(token)), "secret": secret}

    def _revoke_token(self, call: _Call) -> dict[str, Any]:
        with self._database.session() as session:
            token = call.parameters["id"]
            tokens.revoke_token(session, call.token.project, token, at=datetime.now(UTC))
        return {"revoked": token}


@dataclass(frozen=True, slots=True)
class _Call:
    """A received request of a bearer. path: the file of its content. parameters: as read."""

    token: tokens.Token
    action: str
    is_safe: bool
    query: tuple[tuple[str, str], ...]
    path: Path
    key: str | None
    content_hash: str
    content_bytes: int
    client: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def without_path(self, text: str) -> str:
        for path in (self.path, self.path.with_name(_RECORDS_FILE)):
            text = text.replace(str(path), "the content")
        return text


async def _received(request: Request, token: tokens.Token, path: Path, most: int) -> _Call:
    """Write the content of a request to a file. Raises _Refusal."""
    key = request.headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise _Refusal(422, "the Idempotency-Key is 1 to 200 printable letters without spaces")
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding not in ("identity", "gzip"):
        raise _Refusal(415, "send the content as it is, or with Content-Encoding: gzip")
    received, size = path.with_name("received"), 0
    with received.open("wb") as file:
        async for part in _parts(request):
            size += len(part)
            if size > most:
                raise _too_large(most)
            await run_in_threadpool(file.write, part)
    digest = await run_in_threadpool(_decode, received, path, most, is_packed=coding == "gzip")
    # The same content with other parameters is another request.
    digest.update(repr((request.url.path, sorted(request.query_params.multi_items()))).encode())
    return _Call(
        token=token,
        action=f"{request.method} {request.url.path}",
        is_safe=request.method == "GET",
        query=(
            *((name, str(value)) for name, value in request.path_params.items()),
            *request.query_params.multi_items(),
        ),
        path=path,
        key=key,
        content_hash=digest.hexdigest(),
        content_bytes=size,
        client=request.client.host if request.client else "",
    )


async def _parts(request: Request) -> AsyncIterator[bytes]:
    """Iterate over the content. Raises _Refusal if its sender, which may be gone, is silent."""
    parts = aiter(request.stream())
    with suppress(StopAsyncIteration):
        while True:
            try:
                part = await asyncio.wait_for(anext(parts), _MAX_SILENCE_S)
            except TimeoutError:
                raise _Refusal(408, f"nothing came for {_MAX_SILENCE_S:g} s") from None
            yield part


def _decode(received: Path, path: Path, most: int, *, is_packed: bool) -> Any:
    """Write a content without its coding to a file; return its hash. Raises _Refusal."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            received.open("rb") as raw,
            unpacked(raw) if is_packed else nullcontext(raw) as content,
            path.open("wb") as file,
        ):
            while part := content.read(1 << 20):
                size += len(part)
                if size > most:
                    raise _too_large(most)
                digest.update(part)
                file.write(part)
    except DAMAGED:
        raise _Refusal(400, "the gzip content is cut off or damaged") from None
    received.unlink()
    return digest


def _too_large(most: int) -> _Refusal:
    return _Refusal(413, f"over {most:,} bytes: split the content")


def _origin(call: _Call) -> Origin:
    """Return the origin that the parameters name. Raises UsageError."""
    of = call.parameters
    texts = {name: of.get(name, "").strip() for name in ("device", "branch", "occasion")}
    if unprintable := [name for name, text in texts.items() if not text.isprintable()]:
        raise UsageError(f"{unprintable[0]} has letters that can't be printed")
    return Origin(
        call.token.project,
        commit_of(of["commit"]) if of.get("commit") else None,
        time=of["time"].isoformat() if "time" in of else None,
        **texts,
    )


def _counts(done: Imported) -> dict[str, Any]:
    return {
        "read": done.read,
        "added": done.added,
        "replaced": done.replaced,
        "refused": len(done.refused),
        "refusals": [f"{refused.name}: {refused.reason}" for refused in done.refused[:_MAX_LISTED]],
        "remarks": dict(done.remarks.most_common(_MAX_LISTED)),
    }


def _file_name(request: Request) -> str:
    name = request.query_params.get("filename", "")
    return name if _FILE.fullmatch(name) else "content"


def _stored_name(project: str) -> str:
    return "" if project == OWN_PROJECT else project


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in values.items()
    }


def _repeated(call: _Call, first: tokens.AuditEntry) -> Response:
    if first.content_hash != call.content_hash:
        detail = "this Idempotency-Key was used for another request: take a new one"
        return _refused(_Refusal(422, detail))
    return _json(first.status, first.answer, **{"Idempotency-Replayed": "true"})


def _json(status: int, answer: Mapping[str, Any], **headers: str) -> Response:
    if status != 200:
        return _refused(_Refusal(status, str(answer["detail"])))
    return Response(json.dumps(answer), status, headers, JSON)


def _refused(error: _Refusal) -> Response:
    return Response(problem(error.status, error.detail), error.status, error.headers, PROBLEM)
