"""The HTTP server in front of an engine of another process: `python -m` this module LINK SOCKET.

LINK: file descriptor of the link to the engine's process, whose first message is HttpSettings.
SOCKET: that of the listening socket.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import uvicorn

from flexq_bench.read_api.browser_guard import DATA_POLICY, BrowserGuard
from flexq_bench.serving.app import ServedModel, serving_app
from flexq_bench.serving.engine_link import EngineFacts, RemoteEngine, next_message

_GRACE_S = 2  # for answers that are on their way when the server is stopped


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """hosts: names under which the server may be addressed, see allowed_hosts."""

    model: ServedModel
    engine: EngineFacts
    hosts: Sequence[str]


async def serve(link: socket.socket, listening: socket.socket) -> None:
    """Serve until a signal comes or the engine's process ends the link."""
    reader, writer = await asyncio.open_connection(sock=link)
    settings: HttpSettings = await next_message(reader)
    engine = RemoteEngine(settings.engine, writer)
    app = BrowserGuard(serving_app(settings.model, engine), settings.hosts, DATA_POLICY)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
        )
    )

    async def receive() -> None:
        await engine.receive(reader)
        server.should_exit = True

    receiving = asyncio.create_task(receive())
    try:
        await server.serve(sockets=[listening])
    finally:
        receiving.cancel()
        writer.close()


def main() -> None:
    link, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    with suppress(KeyboardInterrupt, asyncio.IncompleteReadError):  # uvicorn raises it again
        asyncio.run(serve(link, listening))


if __name__ == "__main__":
    main()
