"""Serving requests on an engine: pieces of prompts are read between steps, several together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexq_bench.decode.continuous_batching import Piece, Reading, Schedule, Turn, step_sizes
from flexq_bench.decode.decoder import Pieces
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.requests import Request
from flexq_bench.decode.stopwatch import stopwatch
from flexq_bench.errors import MeasureError

_FEWEST_SEEN = 128  # positions that attention of prompts is laid out for
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Served:
    """latency_ms, ttft_ms: of each request, from its admission to its last and its first token.

    token_ms: every time between two steps, prompts in between included. seconds: of everything.
    answers: the tokens of each request, int64.
    """

    latency_ms: tuple[float, ...]
    ttft_ms: tuple[float, ...]
    token_ms: tuple[float, ...]
    seconds: float
    answers: tuple[torch.Tensor, ...]


def slots_within(limit: int, weights: int, reserve: int, slot: int, batch_limit: int) -> int:
    """Sequences at a time that fit `limit` bytes beside weights and reserve, at most batch_limit.

    slot: bytes of one sequence's cache. Raises MeasureError if not one fits.
    """
    slots = min(batch_limit, (limit - weights - reserve) // slot)
    if slots < 1:
        needed = weights + reserve + slot
        raise MeasureError(
            f"one sequence needs {needed / _GIB:.1f} GiB ({weights / _GIB:.1f} of weights), and "
            f"{limit / _GIB:.1f} are given: raise --memory-gib, or pick another scheme"
        )
    return slots


def serve(
    engine: Engine, requests: Sequence[Request], prompts: torch.Tensor, step_tokens: int
) -> Served:
    """Serve all requests, which wait in order from the beginning.

    prompts: int32 [requests, longest prompt], each as long as its request says. Between two steps
    pieces of prompts are read, of up to step_tokens tokens: nobody waits longer for a token.
    """
    _prepare(engine, requests, step_tokens)
    watch = stopwatch(engine.model.device)
    began, first, ended = ([0] * len(requests) for _ in range(3))
    answers: list[torch.Tensor] = [prompts[:0, 0]] * len(requests)
    steps: list[int] = []  # the mark after each
    watch.mark()
    for mark, turn in enumerate(Schedule(requests, engine.slots, step_tokens).turns(), start=1):
        for admission in turn.admitted:
            began[admission.index] = mark - 1
        if turn.reading is None:
            engine.advance(*_step(engine, turn))
            steps.append(mark)
        else:
            engine.read(_pieces(engine, turn.reading, prompts), len(turn.reading.pieces))
        watch.mark()
        for index in turn.begun:
            first[index] = mark
        for slot, index in turn.finished:
            ended[index] = mark
            request = requests[index]
            answer = engine.history[slot, request.prompt_tokens : request.length]
            answers[index] = answer.clone()
            engine.clear(slot)
    at_ms = np.concatenate([[0.0], np.cumsum(watch.intervals_ms())])
    return Served(
        tuple((at_ms[ended] - at_ms[began]).tolist()),
        tuple((at_ms[first] - at_ms[began]).tolist()),
        tuple(np.diff(at_ms[steps]).tolist()),
        float(at_ms[-1]) / 1000,
        tuple(answers),
    )


def _prepare(engine: Engine, requests: Sequence[Request], step_tokens: int) -> None:
    """Capture every step and every reading that these requests will need."""
    turns = list(Schedule(requests, engine.slots, step_tokens).turns())
    for step in sorted({_step(engine, turn) for turn in turns if turn.reading is None}):
        engine.prepare(*step)
    readings = [turn.reading for turn in turns if turn.reading is not None]
    shapes = {(one.rows, one.tokens, _seen(engine, one.longest)) for one in readings}
    for shape in sorted(shapes):
        engine.prepare_prompts(*shape)


def _step(engine: Engine, turn: Turn) -> tuple[int, int]:
    """Slots and bucket of the step that is prepared for a turn."""
    batch = min(size for size in step_sizes(engine.slots) if size >= turn.decoding)
    return batch, engine.bucket(turn.longest)


def _pieces(engine: Engine, reading: Reading, prompts: torch.Tensor) -> Pieces:
    """Return the engine's input for a reading. Padded rows use the last position, never read."""
    spare = [Piece(0, 0, engine.capacity - 1, 1)] * (reading.rows - len(reading.pieces))
    pieces = [*reading.pieces, *spare]
    table = [[p.index, p.start, p.count, p.slot] for p in pieces]
    on_host = torch.tensor(table, dtype=torch.int64).T.contiguous()
    if prompts.is_cuda:  # a copy from pinned memory doesn't wait for the work before it
        on_host = on_host.pin_memory()
    index, start, count, slot = on_host.to(prompts.device, non_blocking=True)
    within = torch.arange(reading.tokens, device=prompts.device)
    columns = (start[:, None] + within).clamp(max=prompts.shape[1] - 1)
    return Pieces(
        prompts[index[:, None], columns], start, count, slot, _seen(engine, reading.longest)
    )


def _seen(engine: Engine, length: int) -> int:
    """Positions that a piece which ends at `length` looks at: few numbers, so that graphs are."""
    return min(max(_FEWEST_SEEN, 1 << (length - 1).bit_length()), engine.capacity)
