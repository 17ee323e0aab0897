"""Protection of the two servers, dashboard and API, from pages of other sites in a user's browser.

A page of another site can send requests to a server on this machine. Without a name that it may
use, it must not read the answers, open a websocket, or show the pages in a frame. DNS rebinding
makes the other site's name point here, so the name in the `Host` header is checked too.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexq_bench.read_api.problems import PROBLEM, problem

HOSTS_VARIABLE = "FLEXQ_BENCH_ALLOWED_HOSTS"  # names, separated by commas
_EVERY_ADDRESS = ("0.0.0.0", "::")
# Streamlit's pages compile their charts (Vega) and load WebAssembly (tables), style elements
# inline, and show images and files as data. Everything comes from the server itself.
PAGE_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
DATA_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def allowed_hosts(address: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names under which a server may be addressed, in lower case.

    address: that it listens on. names: further ones, such as the proxy's. Addresses (numbers) need
    no mention: only a name can be rebound.
    """
    known = ["localhost", address]
    if address in _EVERY_ADDRESS:
        known += [socket.gethostname(), socket.getfqdn()]
    return tuple(dict.fromkeys(name.lower().rstrip(".") for name in (*known, *names)))


@dataclass(frozen=True, slots=True)
class BrowserGuard:
    """ASGI middleware: refuses other sites with status 403, and adds headers for browsers.

    hosts: names that `Host` may have, see `allowed_hosts`. origins: other sites whose pages may
    read the answers (`https://wiki.example.com`). policy: the Content-Security-Policy.
    """

    app: ASGIApp
    hosts: Sequence[str]
    policy: str
    origins: Sequence[str] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_allowed(host):
            await _refuse(scope, receive, send, f"host {host!r:.80} is not this server's")
        elif not (origin is None or self._is_own(origin, host) or origin in self.origins):
            await _refuse(scope, receive, send, f"pages of {origin!r:.80} may not read this")
        else:
            named = origin if origin in self.origins else None
            app = _preflight if named and _is_preflight(scope, headers) else self.app
            await app(scope, receive, self._with_headers(send, named))

    def _is_allowed(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return name in self.hosts or _is_address(name)

    def _is_own(self, origin: str, host: str) -> bool:
        """Return True for a page of this server; also behind a proxy that ends TLS."""
        try:
            return urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:
            return False

    def _with_headers(self, send: Send, origin: str | None) -> Send:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["content-security-policy"] = self.policy
                headers["x-frame-options"] = "DENY"
                headers["x-content-type-options"] = "nosniff"
                headers["referrer-policy"] = "no-referrer"
                if self.origins:
                    headers.add_vary_header("Origin")
                if origin is not None:
                    headers["access-control-allow-origin"] = origin
                    headers["access-control-expose-headers"] = "ETag, Retry-After"
            await send(message)

        return send_with_headers


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    is_options = scope["type"] == "http" and scope["method"] == "OPTIONS"
    return is_options and "access-control-request-method" in headers


async def _preflight(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a preflight request: other sites may read, with conditions and credentials of ours."""
    allowed = {
        "access-control-allow-methods": "GET, HEAD",
        "access-control-allow-headers": "Authorization, If-None-Match",
        "access-control-max-age": "600",
    }
    await Response(None, 204, allowed)(scope, receive, send)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _refuse(scope: Scope, receive: Receive, send: Send, reason: str) -> None:
    if scope["type"] == "websocket":  # before it is accepted: the handshake ends with status 403
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    advice = f"{reason}: start it with --allow-host or --allow-origin if it should be"
    await Response(problem(403, advice), 403, media_type=PROBLEM)(scope, receive, send)
