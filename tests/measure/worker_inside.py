"""A worker that runs in the process of the test, by a protocol of little time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from flexq_bench.measure import PROTOCOL_CPU, Meter
from flexq_bench.measure.ab.operations import WorkerOperations
from flexq_bench.measure.protocol import WarmUp

FAST = replace(
    PROTOCOL_CPU,
    warm_up=WarmUp(0.0, 0.005, agreement=1.0),
    rewarm=WarmUp(0.0, 0.005, agreement=1.0),
    batch_s=0.005,
    turn_s=0.003,
    # Some copies of the weights take the same way as thousands.
    min_cache_factor=0.02,
    cache_factor=0.02,
)
Answer = Callable[[dict[str, Any], dict[str, Any]], object]


class Inside:
    """A worker in this process. answers: what becomes of the replies to an operation."""

    def __init__(self, meter: Meter, **answers: Answer) -> None:
        self._operations, self._answers = WorkerOperations(meter), answers
        self.secret: int | None = None

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        reply: dict[str, Any] = getattr(self._operations, what)(**arguments)
        return self._answers.get(what, lambda reply, _: reply)(reply, arguments)

    def send(self, what: str, **arguments: Any) -> None:
        self._reply = self.ask(what, **arguments)

    def receive(self) -> dict[str, Any]:
        return self._reply

    def request_identity(self) -> None:
        self.send("describe")

    def check_identity(self) -> dict[str, Any]:
        self.reseed(len(str(id(self))))
        return self._operations.describe()

    def reseed(self, secret: int) -> None:
        self.ask("reseed", secret=secret)
        self.secret = secret

    def paused(self, others=()):
        return nullcontext()

    def rescheduled(self):
        return ""

    def waited_s(self):
        return 0.0

    def run_on(self, cpus):
        """It is where this process is."""

    def finish(self):
        """It has no process that ends."""
