"""Continuous batching: which request has which slot, and which prompts are read next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from flexq_bench.decode.requests import Request

_FEWEST_SLOTS, _SLOT_FACTOR = 8, 4  # of steps: fewer sequences take as long, or nearly
_SHORTEST_PIECE = 64  # tokens: shorter pieces take as long


@dataclass(frozen=True, slots=True)
class Admission:
    """A request, by its index, that begins in a slot."""

    slot: int
    index: int
    request: Request


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a request's prompt: `count` tokens from `start` on, for its slot."""

    slot: int
    index: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Pieces that are read together, as `rows` of `tokens` each: the rest is padding."""

    rows: int
    tokens: int
    pieces: tuple[Piece, ...]

    @property
    def longest(self) -> int:
        """Largest end position of the pieces, in tokens."""
        return max(piece.start + piece.count for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Turn:
    """A reading, or a step on the first `decoding` slots, none of which then has more than
    `longest` tokens; and what changes by it.

    admitted: begun just before. begun: indices of requests that have their first token by it.
    finished: slot and index of those that have all their tokens by it.
    """

    reading: Reading | None
    decoding: int
    longest: int
    admitted: tuple[Admission, ...]
    begun: tuple[int, ...]
    finished: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Active:
    index: int
    prompt: int
    left: int  # tokens still to be decoded
    read: int = 0  # of the prompt
    length: int = 0  # tokens so far with the newest; 0: the prompt isn't read yet


class Schedule:
    """Slots and the queue before them. A slot is filled again as soon as its request is done.

    Free slots with low numbers are filled first: a step needs no more than up to the last one.
    step_tokens: of prompts that are read together, padding included, at most.
    """

    def __init__(self, requests: Sequence[Request], slots: int, step_tokens: int) -> None:
        self._waiting = deque(enumerate(requests))
        self._active: dict[int, _Active] = {}  # in the order of admission
        self._free = list(range(slots))
        heapify(self._free)
        self._shapes = reading_shapes(step_tokens)

    def turns(self) -> Iterator[Turn]:
        """Readings and steps in turn, until every request has all its tokens."""
        while not self.is_done:
            admitted = tuple(self.admit())
            reading = self.next_reading()
            if reading is not None:
                begun = tuple(self.read(reading))
                done = tuple(self.finish())
                yield Turn(reading, 0, reading.longest, admitted, begun, done)
            decoding, longest = self.decoding, self.longest
            if decoding:
                self.step()
                yield Turn(None, decoding, longest, (), (), tuple(self.finish()))

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._active

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence once every decoding one has one more."""
        return max((active.length + 1 for active in self._decoding()), default=1)

    @property
    def decoding(self) -> int:
        """Slots that a step needs: up to the last that decodes."""
        return max((slot + 1 for slot, active in self._active.items() if active.length), default=0)

    def admit(self) -> list[Admission]:
        """The requests that begin now."""
        begun = []
        while self._free and self._waiting:
            index, request = self._waiting.popleft()
            slot = heappop(self._free)
            begun.append(Admission(slot, index, request))
            self._active[slot] = _Active(index, request.prompt_tokens, request.new_tokens)
        return begun

    def next_reading(self) -> Reading | None:
        """Return the pieces to read next, in the order of admission; None: every prompt is read.

        The shape is the one that reads the most tokens of prompts; among equals, the one with the
        least padding.
        """
        waiting = [(slot, one) for slot, one in self._active.items() if not one.length]
        if not waiting:
            return None

        def useful(shape: tuple[int, int]) -> tuple[int, int]:
            rows, tokens = shape
            wanted = sum(min(tokens, one.prompt - one.read) for _, one in waiting[:rows])
            return wanted, -rows * tokens

        rows, tokens = max(self._shapes, key=useful)
        pieces = [
            Piece(slot, one.index, one.read, min(tokens, one.prompt - one.read))
            for slot, one in waiting[:rows]
        ]
        return Reading(rows, tokens, tuple(pieces))

    def read(self, reading: Reading) -> list[int]:
        """The pieces have been read; indices of the requests that have their first token now."""
        begun = []
        for piece in reading.pieces:
            active = self._active[piece.slot]
            active.read += piece.count
            if active.read == active.prompt:
                active.length = active.prompt + 1
                active.left -= 1
                begun.append(active.index)
        return begun

    def finish(self) -> list[tuple[int, int]]:
        """Slot and index of the requests that have all their tokens; their slots are free now."""
        done = [(slot, active.index) for slot, active in self._active.items() if active.left == 0]
        for slot, _ in done:
            del self._active[slot]
            heappush(self._free, slot)
        return done

    def step(self) -> None:
        """Every decoding request has one more token."""
        for active in self._decoding():
            active.length += 1
            active.left -= 1

    def _decoding(self) -> Iterator[_Active]:
        return (active for active in self._active.values() if active.length)


def reading_shapes(step_tokens: int) -> list[tuple[int, int]]:
    """Rows and tokens of the pieces that may be read together: powers of two of both."""
    shapes = []
    tokens = min(_SHORTEST_PIECE, step_tokens)
    while tokens <= step_tokens:
        rows = 1
        while rows * tokens <= step_tokens:
            shapes.append((rows, tokens))
            rows *= 2
        tokens *= 2
    return shapes


def step_sizes(slots: int) -> list[int]:
    """Sequences that steps are prepared for, largest first: all slots, 8, 32, 128 and so on."""
    sizes = [slots]
    fewer = _FEWEST_SLOTS
    while fewer < slots:
        sizes.append(fewer)
        fewer *= _SLOT_FACTOR
    return sorted(sizes, reverse=True)
