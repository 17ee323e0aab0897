"""Places for two engines: both run where there are two GPUs; else only one runs at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from flexq_bench.served.engines import READY_S, EngineSpec, RunningEngine, started
from flexq_bench.served.errors import EngineError

BASE, HEAD = "base", "head"


@dataclass(frozen=True, slots=True)
class Places:
    """Places of engines. gpus: indices or UUIDs; none: CUDA_VISIBLE_DEVICES is left as it is.

    model: to ask for; None: the first one that an engine lists. key: a bearer token for both.
    """

    gpus: tuple[str, ...] = ()
    model: str | None = None
    ready_within_s: float = READY_S
    folder: Path | None = None
    key: str | None = None


class Turns:
    """Both engines of a comparison, by their names BASE and HEAD; see `taking_turns`."""

    def __init__(self, base: EngineSpec, head: EngineSpec, places: Places) -> None:
        self._specs = {BASE: base, HEAD: head}
        self._places, self._swapped = places, False
        self.models: dict[str, str] = {}  # by engine, once it ran
        self.ready_s: dict[str, float] = {}  # the longest time until it was ready
        self._running: dict[str, tuple[RunningEngine, ExitStack]] = {}

    @property
    def share_a_place(self) -> bool:
        """True if only one of both can run at a time, so that to change costs a start."""
        here = all(spec.is_started_here for spec in self._specs.values())
        return here and len(self._places.gpus) < 2

    def engine(self, name: str) -> RunningEngine:
        """Return the running engine of a name. The other one is ended if they share a place.

        Raises EngineError if it does not start, or has died.
        """
        if name in self._running:
            running, _ = self._running[name]
            if reason := running.died():
                raise EngineError(f"{name}: the engine died with {reason}")
            return running
        if self.share_a_place:
            self.end()
        stack = ExitStack()
        place = (name == HEAD) != self._swapped
        gpus = self._places.gpus
        running = stack.enter_context(
            started(
                self._specs[name],
                gpu=gpus[place % len(gpus)] if gpus else None,
                model=self._places.model,
                ready_within_s=self._places.ready_within_s,
                folder=self._places.folder,
                key=self._places.key,
            )
        )
        self._running[name] = running, stack
        self.models[name] = running.model
        self.ready_s[name] = max(running.ready_s, self.ready_s.get(name, 0.0))
        return running

    def order(self, block: int) -> tuple[str, str]:
        """Return the order of both in a block: ABBA, which saves starts and cancels drifts."""
        return (BASE, HEAD) if block % 2 == 0 else (HEAD, BASE)

    def place(self, block: int) -> None:
        """Let both change places before every second block, as `order` does."""
        if block % 2:
            self.swap()

    def swap(self) -> None:
        """Let both change places, which ends those that were started on GPUs of their own."""
        self._swapped = not self._swapped
        if len(self._places.gpus) > 1:
            self.end()

    def end(self) -> None:
        """End the engines that were started here."""
        if self._running:
            _, (_, stack) = self._running.popitem()
            try:
                stack.close()
            finally:  # the other one, too, if this is interrupted
                self.end()


@contextmanager
def taking_turns(base: EngineSpec, head: EngineSpec, places: Places) -> Iterator[Turns]:
    """Run a comparison's engines as they are needed, and end them with the block."""
    turns = Turns(base, head, places)
    try:
        yield turns
    finally:
        turns.end()


def gpus_of(text: str | None) -> tuple[str, ...]:
    """Return the GPUs of `0,1`."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
