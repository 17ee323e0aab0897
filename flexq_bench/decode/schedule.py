"""Continuous batching: which request has which slot, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flexq_bench.decode.requests import Request


@dataclass(frozen=True, slots=True)
class Admission:
    """A request, by its index, that begins in a slot."""

    slot: int
    index: int
    request: Request


@dataclass(slots=True)
class _Active:
    index: int
    length: int  # tokens so far, with the newest
    left: int  # tokens still to be decoded


class Schedule:
    """Slots and the queue before them. A slot is filled again as soon as its request is done."""

    def __init__(self, requests: Sequence[Request], slots: int) -> None:
        self._waiting = deque(enumerate(requests))
        self._active: dict[int, _Active] = {}
        self._free = deque(range(slots))

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._active

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence once every active one has one more."""
        return max((active.length + 1 for active in self._active.values()), default=1)

    @property
    def running(self) -> int:
        return len(self._active)

    def admit(self) -> list[Admission]:
        """The requests that begin now. Each has its first token when its prompt has been read."""
        begun = []
        while self._free and self._waiting:
            index, request = self._waiting.popleft()
            slot = self._free.popleft()
            begun.append(Admission(slot, index, request))
            length = request.prompt_tokens + 1
            self._active[slot] = _Active(index, length, request.new_tokens - 1)
        return begun

    def finish(self) -> list[tuple[int, int]]:
        """Slot and index of the requests that have all their tokens; their slots are free now."""
        done = [(slot, active.index) for slot, active in self._active.items() if active.left == 0]
        for slot, _ in done:
            del self._active[slot]
            self._free.append(slot)
        return done

    def step(self) -> None:
        """Every active request has one more token."""
        for active in self._active.values():
            active.length += 1
            active.left -= 1
