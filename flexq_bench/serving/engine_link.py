"""The link between an engine's process and that of the HTTP server.

Each has an interpreter of its own, so that the text of answers is made while the engine runs. A
message is a pickled value of this module with its length before it; only these two processes, of
which one started the other, have the socket. The engine sends one message a pass.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from flexq_bench.errors import InfrastructureError
from flexq_bench.serving.generation import Chosen, End, Event, Generation, QueueFullError

if TYPE_CHECKING:
    from flexq_bench.serving.engine_thread import EngineThread

_LENGTH_BYTES = 8
_Top = tuple[tuple[int, float], ...]
_Scored = tuple[int, float | None, _Top]  # Chosen: a tuple is pickled several times as fast
_Row = tuple[int, _Scored, End | None, tuple[_Scored, ...]]  # number of a request, and its Event


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """slots: sequences at a time. most: that are served or wait. capacity: tokens of each."""

    slots: int
    most: int
    capacity: int


@dataclass(frozen=True, slots=True)
class _Add:
    number: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class _Drop:
    number: int


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str


class LinkedEngine:
    """The engine's end: gives its requests to an EngineThread, and sends back what they become.

    settings: the first message, sent by `receive`: it has the vocabulary, which is larger than a
    socket's buffer, so that sending it takes as long as the HTTP server takes to start.
    """

    def __init__(self, link: socket.socket, settings: object) -> None:
        self._link, self._file, self._lock = link, link.makefile("rb"), threading.Lock()
        self._settings = settings
        self._rows: list[_Row] = []
        self._numbers: dict[int, int] = {}  # the thread's, by those of the HTTP server

    def close(self) -> None:
        """Close what reads the link, once `receive` has ended."""
        self._file.close()

    def send(self, message: object) -> None:
        """Send a message; does nothing if the HTTP server has ended."""
        with suppress(OSError), self._lock:
            self._link.sendall(_packed(message))

    def fail(self, error: InfrastructureError) -> None:
        """Tell the HTTP server that the engine failed, and with it all requests."""
        self.send(_Failure(str(error)))

    def flush(self) -> None:
        """Send the tokens since the last time; called in the engine's thread after each pass."""
        rows, self._rows = self._rows, []
        if rows:
            self.send(rows)

    def receive(self, engine: EngineThread) -> None:
        """Send the settings, then give requests to the engine until the HTTP server ends."""
        self.send(self._settings)
        while (message := self._next()) is not None:
            if isinstance(message, _Add):
                receive = partial(self._take, message.number)
                self._numbers[message.number] = engine.submit(message.generation, receive)
            elif (number := self._numbers.pop(message.number, None)) is not None:
                engine.cancel(number)

    def _take(self, number: int, event: Event) -> None:
        prompt = tuple(map(_scored, event.prompt))
        self._rows.append((number, _scored(event.chosen), event.end, prompt))

    def _next(self) -> Any:
        """Return the next message; None: there is none."""
        with suppress(OSError):
            length = self._file.read(_LENGTH_BYTES)
            if len(length) == _LENGTH_BYTES:
                content = self._file.read(int.from_bytes(length))
                if len(content) == int.from_bytes(length):
                    return pickle.loads(content)
        return None


class RemoteEngine:
    """The HTTP server's end, in its event loop: the engine of another process."""

    def __init__(self, facts: EngineFacts, writer: asyncio.StreamWriter) -> None:
        self.most, self.capacity = facts.most, facts.capacity
        self._slots, self._writer = facts.slots, writer
        self._numbers = itertools.count()
        self._receivers: dict[int, Callable[[Event | InfrastructureError], None]] = {}
        self.failure: InfrastructureError | None = None

    def counts(self) -> tuple[int, int]:
        """Sequences that are decoded now, and those that wait."""
        requests = len(self._receivers)
        running = min(requests, self._slots)
        return running, requests - running

    def submit(
        self, generation: Generation, receive: Callable[[Event | InfrastructureError], None]
    ) -> int:
        """Queue a sequence; returns its number. receive: called with each of its events, or with
        the error that ended it. Raises QueueFullError, or the engine's failure.
        """
        if self.failure is not None:
            raise self.failure
        if len(self._receivers) >= self.most:
            raise QueueFullError(f"{self.most} requests are served or wait: try again later")
        number = next(self._numbers)
        self._receivers[number] = receive
        self._writer.write(_packed(_Add(number, generation)))
        return number

    def cancel(self, number: int) -> None:
        """Drop a sequence that nobody waits for; does nothing if it is finished."""
        if self._receivers.pop(number, None) is not None:
            self._writer.write(_packed(_Drop(number)))

    async def receive(self, reader: asyncio.StreamReader) -> None:
        """Deliver events until the engine's process ends the link."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                message = await next_message(reader)
                if isinstance(message, _Failure):
                    self._fail(message)
                else:
                    self._deliver(message)
        self._fail(_Failure("the engine's process ended"))

    def _deliver(self, rows: list[_Row]) -> None:
        for number, chosen, end, prompt in rows:
            receive = self._receivers.get(number)
            if receive is not None:  # else it was dropped, and more tokens were on their way
                receive(Event(Chosen(*chosen), end, tuple(Chosen(*scored) for scored in prompt)))

    def _fail(self, failure: _Failure) -> None:
        self.failure = self.failure or InfrastructureError(failure.message)
        receivers, self._receivers = list(self._receivers.values()), {}
        for receive in receivers:
            receive(self.failure)


async def next_message(reader: asyncio.StreamReader) -> Any:
    """Return the next message. Raises IncompleteReadError at the link's end."""
    length = await reader.readexactly(_LENGTH_BYTES)
    return pickle.loads(await reader.readexactly(int.from_bytes(length)))


def _packed(message: object) -> bytes:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(_LENGTH_BYTES) + content


def _scored(chosen: Chosen) -> _Scored:
    return chosen.token, chosen.logprob, chosen.top
