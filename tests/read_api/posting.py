"""Requests to the ingest API's application, without a network."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote, urlencode

from starlette.applications import Starlette

from flexq_bench.db import tokens
from flexq_bench.read_api.ingest import Ingest, Limits


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def content(self):
        return json.loads(self.body)


class Poster:
    """poster.post("a.csv content", project="acme"): as a bearer of the network would."""

    def __init__(self, database, **limits):
        self.database = database
        self.judged = []
        ingest = Ingest(database, self._judge, Limits(**limits))
        self.app = Starlette(routes=ingest.routes())

    def _judge(self, series):
        self.judged.append(set(series))
        return {"opened_alerts": []}

    def token(self, project="acme", rights="write", days=1):
        now = datetime.now(UTC)
        end = now + timedelta(days=days)
        with self.database.session() as session:
            return tokens.create_token(session, project, "ci", rights, at=now, expires_at=end)

    def post(
        self,
        content,
        secret,
        key=None,
        path="/v1/results",
        method="POST",
        coding=None,
        **parameters,
    ):
        headers = {"authorization": f"Bearer {secret}"} if secret is not None else {}
        headers |= {"idempotency-key": key} if key is not None else {}
        headers |= {"content-encoding": coding} if coding is not None else {}
        return asyncio.run(self._post(content, headers, path, method, parameters))

    async def _post(self, content, headers, path, method, parameters):
        is_silent = content is None  # after its headers
        parts = [content if isinstance(content, bytes) else (content or "").encode()]
        scope = {
            "type": "http",
            "method": method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": urlencode(parameters).encode(),
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "server": ("test", 80),
            "client": ("192.0.2.7", 4000),
            "scheme": "http",
        }
        sent = []

        async def receive():
            if is_silent:
                await asyncio.sleep(60)
            body = parts.pop(0) if parts else b""
            return {"type": "http.request", "body": body, "more_body": bool(parts)}

        async def send(message):
            sent.append(message)

        await self.app(scope, receive, send)
        found = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return Answer(sent[0]["status"], found, b"".join(p.get("body", b"") for p in sent[1:]))
