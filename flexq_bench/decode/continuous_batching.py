"""Scheduler of continuous batching with chunked prefill: slots of requests, chunks of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from flexq_bench.decode.requests import ServingRequest

_MIN_STEP_SLOTS, _STEP_SLOTS_FACTOR = 8, 4  # of step sizes: smaller batches are hardly faster
_MIN_CHUNK_TOKENS = 64  # tokens: shorter chunks are not faster


@dataclass(frozen=True, slots=True)
class Admission:
    """A request, given by its index, that enters a slot."""

    slot: int
    index: int
    request: ServingRequest


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a request's prompt: `count` tokens from position `start`."""

    slot: int
    index: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Chunks in one forward pass over `rows` sequences of `tokens` tokens, with padding."""

    rows: int
    tokens: int
    chunks: tuple[Chunk, ...]

    @property
    def longest(self) -> int:
        """Largest end position of the chunks, in tokens."""
        return max(chunk.start + chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Iteration:
    """A forward pass of the engine: a prefill, or a decode step of the first `decoding` slots.

    longest: tokens of the longest decoding sequence after it, or the largest end of a chunk.
    admitted: requests that enter a slot before it. started: indices of requests that get their
    first token. finished: slot and index of requests that get their last one.
    """

    prefill: PrefillBatch | None
    decoding: int
    longest: int
    admitted: tuple[Admission, ...]
    started: tuple[int, ...]
    finished: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Active:
    index: int
    prompt: int
    remaining: int  # tokens still to be decoded
    read: int = 0  # prompt tokens that are prefilled
    length: int = 0  # tokens including the newest; 0: the prompt is not prefilled yet


class Scheduler:
    """Slots and the queue of requests. A slot is reused as soon as its request is finished.

    The lowest free slot is used first, as a step computes all slots up to the last used one.
    step_tokens: largest number of tokens of a prefill, padding included. Requests may be added and
    removed between iterations.
    """

    def __init__(self, requests: Sequence[ServingRequest], slots: int, step_tokens: int) -> None:
        self._waiting = deque(enumerate(requests))
        self._active: dict[int, _Active] = {}  # in the order of admission
        self._free = list(range(slots))
        heapify(self._free)
        self._shapes = prefill_shapes(step_tokens)

    def add(self, index: int, request: ServingRequest) -> None:
        """Append a request to the queue."""
        self._waiting.append((index, request))

    def remove(self, index: int) -> int | None:
        """End a request before its last token; returns the slot that it had, if any."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != index)
        slot = next((slot for slot, a in self._active.items() if a.index == index), None)
        if slot is not None:
            self._free_slot(slot)
        return slot

    def iterations(self) -> Iterator[Iteration]:
        """Yield prefills and decode steps alternately, until every request is finished."""
        while not self.is_done:
            admitted = tuple(self.admit())
            prefill = self.next_prefill()
            if prefill is not None:
                started = tuple(self.read(prefill))
                done = tuple(self.finish())
                yield Iteration(prefill, 0, prefill.longest, admitted, started, done)
            decoding, longest = self.decoding, self.longest
            if decoding:
                self.step()
                yield Iteration(None, decoding, longest, (), (), tuple(self.finish()))

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._active

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after the next step."""
        return max((active.length + 1 for active in self._decoding_slots()), default=1)

    @property
    def decoding(self) -> int:
        """Slots that a step computes: up to the last one that decodes."""
        return max((slot + 1 for slot, active in self._active.items() if active.length), default=0)

    def admit(self) -> list[Admission]:
        """Move queued requests to free slots, and return them."""
        started = []
        while self._free and self._waiting:
            index, request = self._waiting.popleft()
            slot = heappop(self._free)
            started.append(Admission(slot, index, request))
            self._active[slot] = _Active(index, request.prompt_tokens, request.new_tokens)
        return started

    def next_prefill(self) -> PrefillBatch | None:
        """The next chunks to prefill, in the order of admission; None: there are none.

        The shape is the one with the most prompt tokens; among equals, with the least padding.
        """
        waiting = [(slot, active) for slot, active in self._active.items() if not active.length]
        if not waiting:
            return None

        def useful(shape: tuple[int, int]) -> tuple[int, int]:
            rows, tokens = shape
            prompt_tokens = sum(min(tokens, a.prompt - a.read) for _, a in waiting[:rows])
            return prompt_tokens, -rows * tokens

        rows, tokens = max(self._shapes, key=useful)
        chunks = [
            Chunk(slot, active.index, active.read, min(tokens, active.prompt - active.read))
            for slot, active in waiting[:rows]
        ]
        return PrefillBatch(rows, tokens, tuple(chunks))

    def read(self, prefill: PrefillBatch) -> list[int]:
        """Record a prefill; returns the indices of the requests that got their first token."""
        started = []
        for chunk in prefill.chunks:
            active = self._active[chunk.slot]
            active.read += chunk.count
            if active.read == active.prompt:
                active.length = active.prompt + 1
                active.remaining -= 1
                started.append(active.index)
        return started

    def finish(self) -> list[tuple[int, int]]:
        """Free the slots of finished requests; returns their slots and indices."""
        done = [
            (slot, active.index) for slot, active in self._active.items() if active.remaining == 0
        ]
        for slot, _ in done:
            self._free_slot(slot)
        return done

    def step(self) -> None:
        """Record a step, which adds a token to every decoding request."""
        for active in self._decoding_slots():
            active.length += 1
            active.remaining -= 1

    def _free_slot(self, slot: int) -> None:
        del self._active[slot]
        heappush(self._free, slot)

    def _decoding_slots(self) -> Iterator[_Active]:
        return (active for active in self._active.values() if active.length)


def prefill_shapes(step_tokens: int) -> list[tuple[int, int]]:
    """Possible rows and tokens of a prefill: powers of two."""
    shapes = []
    tokens = min(_MIN_CHUNK_TOKENS, step_tokens)
    while tokens <= step_tokens:
        rows = 1
        while rows * tokens <= step_tokens:
            shapes.append((rows, tokens))
            rows *= 2
        tokens *= 2
    return shapes


def step_sizes(slots: int) -> list[int]:
    """Batch sizes for which steps are captured, largest first: all slots, 8, 32, 128 and so on."""
    sizes = [slots]
    fewer = _MIN_STEP_SLOTS
    while fewer < slots:
        sizes.append(fewer)
        fewer *= _STEP_SLOTS_FACTOR
    return sorted(sizes, reverse=True)
