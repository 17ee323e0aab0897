"""A proxy before a database server that drops, delays and cuts what goes through it."""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

_CHUNK = 65536
_LOOK_S = 0.02


class Proxy:
    """Listens on a TCP port and forwards to a server's Unix socket, or to a TCP port.

    server: may be replaced, by one that takes over. delay_s: before each piece that is forwarded.
    loses: share of pieces that never arrive, which ends their connection. drops: forward nothing,
    in silence. refuses: take no connection. loses_commits: so many COMMITs are forwarded and their
    answers are not, then the connection is cut: who sent one can't know what became of it.
    """

    def __init__(self, server: Path | tuple[str, int], host: str = "127.0.0.1") -> None:
        self.server = server
        self.delay_s, self.drops, self.refuses, self.loses_commits = 0.0, False, False, 0
        self.loses, self._chance = 0.0, random.Random(0)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close every connection that goes through."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _close(pair)

    def heal(self) -> None:
        """Forward all from now on; connections that lost something meanwhile end."""
        dropped = self.drops
        self.delay_s, self.drops, self.refuses, self.loses_commits = 0.0, False, False, 0
        self.loses = 0.0
        if dropped:
            self.cut()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses:
                client.close()
                continue
            try:
                pair = (client, self._connected())
            except OSError:
                client.close()
                continue
            with self._lock:
                self._pairs.append(pair)
            threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _connected(self) -> socket.socket:
        if isinstance(self.server, tuple):
            return socket.create_connection(self.server)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(str(self.server))
        except OSError:
            server.close()
            raise
        return server

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while True:
                ready, _, _ = select.select([client, server], [], [], _LOOK_S)
                if self.drops:
                    time.sleep(_LOOK_S)
                    continue
                for side in ready:
                    data = side.recv(_CHUNK)
                    if not data:
                        raise ConnectionError
                    if self.delay_s:
                        time.sleep(self.delay_s)
                    if self._chance.random() < self.loses:
                        raise ConnectionError
                    (server if side is client else client).sendall(data)
                    if side is client and b"COMMIT" in data and self.loses_commits:
                        self.loses_commits -= 1
                        server.recv(_CHUNK)  # it is committed
                        raise ConnectionError
        _close((client, server))


def _close(pair: tuple[socket.socket, socket.socket]) -> None:
    for side in pair:
        with suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
        side.close()
