"""A reverse proxy for tests, as docs/dashboard.md asks for one: it wants a name and a password,
serves what is below one path, passes the Host header on, and lets websockets through."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

NAME, PASSWORD = "ada", "secret"
_AUTHORIZED = b"Basic " + base64.b64encode(f"{NAME}:{PASSWORD}".encode())
_DENIED = (
    b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm=test\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)
_NO_ICON = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"  # a browser asks any host
_NOT_HERE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass
class Proxy:
    """url: of the path that it serves. passed: paths of requests that were let through."""

    url: str
    passed: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)  # paths that it does not serve
    websockets: list[str] = field(default_factory=list)


@contextmanager
def proxied(target_port: int, below: str) -> Iterator[Proxy]:
    """A proxy in front of a port of this machine, on a thread of its own."""
    proxy, ready = Proxy(""), threading.Event()
    loop, stopping = asyncio.new_event_loop(), asyncio.Event()
    serving = _stand(proxy, target_port, below, ready, stopping)
    thread = threading.Thread(target=loop.run_until_complete, args=(serving,))
    thread.start()
    try:
        assert ready.wait(timeout=10)
        yield proxy
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(timeout=10)
        loop.close()


async def _stand(
    proxy: Proxy, target_port: int, below: str, ready: threading.Event, stopping: asyncio.Event
) -> None:
    """Serve until told to stop; then every connection is closed, too."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await _serve(reader, writer, proxy, target_port, below)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side went away, or the test is over
        finally:
            writer.close()
            connections.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/{below}"
    ready.set()
    await stopping.wait()
    server.close()
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections)
    await asyncio.sleep(0.1)  # let transports close what they hold


async def _serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    proxy: Proxy,
    target_port: int,
    below: str,
) -> None:
    """Handle one request per connection, so that each is checked."""
    head = await reader.readuntil(b"\r\n\r\n")
    request, *lines = head.rstrip().split(b"\r\n")
    path = request.split()[1].decode()
    headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)}
    if headers.get(b"authorization") != _AUTHORIZED:
        writer.write(_DENIED)
        return
    if path == "/favicon.ico":
        writer.write(_NO_ICON)
        return
    if not path.startswith(f"/{below}/") and path != f"/{below}":
        proxy.outside.append(path)
        writer.write(_NOT_HERE)
        return
    upgrades = b"upgrade" in headers
    (proxy.websockets if upgrades else proxy.passed).append(path)
    if not upgrades:
        kept = [line for line in lines if not line.lower().startswith(b"connection:")]
        head = b"\r\n".join((request, *kept, b"Connection: close")) + b"\r\n\r\n"
    their_reader, their_writer = await asyncio.open_connection("127.0.0.1", target_port)
    try:
        their_writer.write(head)
        await asyncio.gather(_pass_on(reader, their_writer), _pass_on(their_reader, writer))
    finally:
        their_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(1 << 16):
        writer.write(block)
        await writer.drain()
    writer.close()
