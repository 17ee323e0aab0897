"""Serving of requests on an engine by continuous batching with chunked prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexq_bench.decode.continuous_batching import (
    Iteration,
    PrefillBatch,
    Scheduler,
    prefill_shapes,
    step_sizes,
)
from flexq_bench.decode.decoder import Chunks
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.requests import ServingRequest
from flexq_bench.decode.stopwatch import Stopwatch
from flexq_bench.errors import MeasureError

_MIN_ATTENTION_TOKENS = 128  # positions of a prefill's attention
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ServingTimes:
    """Times of served requests. latency_ms, ttft_ms: from admission to the last and first token.

    token_ms: times between consecutive steps, including prefills between them. seconds: in total.
    answers: the tokens of each request, int64.
    """

    latency_ms: tuple[float, ...]
    ttft_ms: tuple[float, ...]
    token_ms: tuple[float, ...]
    seconds: float
    answers: tuple[torch.Tensor, ...]


def slots_within(limit: int, weights: int, reserve: int, slot: int, batch_limit: int) -> int:
    """Number of sequences that fit `limit` bytes with weights and reserve, at most batch_limit.

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
    engine: Engine,
    requests: Sequence[ServingRequest],
    prompts: torch.Tensor,
    step_tokens: int,
    on_pass: Callable[[Iteration, torch.Tensor], None] = lambda iteration, logits: None,
) -> ServingTimes:
    """Serve all requests, which are queued in order from the start.

    prompts: int32 [requests, longest prompt], padded. At most step_tokens prompt tokens are
    prefilled between two steps, which limits the time between tokens of a request. on_pass: called
    after each forward pass with the logits FP16 [B, vocab] of its chunks or slots; it may change
    the engine's `tokens`.
    """
    _prepare(engine, requests, step_tokens)
    watch = Stopwatch(engine.model.device)
    began, first, ended = ([0] * len(requests) for _ in range(3))
    answers: list[torch.Tensor] = [prompts[:0, 0]] * len(requests)
    steps: list[int] = []  # index of the mark after each
    watch.mark()
    for mark, iteration in enumerate(
        Scheduler(requests, engine.slots, step_tokens).iterations(), start=1
    ):
        for admission in iteration.admitted:
            began[admission.index] = mark - 1
        rows = [] if iteration.prefill is None else [p.index for p in iteration.prefill.chunks]
        on_pass(iteration, run(engine, iteration, prompts, rows))
        if iteration.prefill is None:
            steps.append(mark)
        watch.mark()
        for index in iteration.started:
            first[index] = mark
        for slot, index in iteration.finished:
            ended[index] = mark
            request = requests[index]
            answer = engine.history[slot, request.prompt_tokens : request.length]
            answers[index] = answer.clone()
            engine.clear(slot)
    at_ms = np.concatenate([[0.0], np.cumsum(watch.intervals_ms())])
    return ServingTimes(
        tuple((at_ms[ended] - at_ms[began]).tolist()),
        tuple((at_ms[first] - at_ms[began]).tolist()),
        tuple(np.diff(at_ms[steps]).tolist()),
        float(at_ms[-1]) / 1000,
        tuple(answers),
    )


def run(
    engine: Engine, iteration: Iteration, prompts: torch.Tensor, rows: Sequence[int]
) -> torch.Tensor:
    """Run an iteration; returns the logits FP16 [B, vocab] of its chunks or slots.

    prompts: int32 [any, longest prompt], padded. rows: the row of each chunk's prompt.
    """
    if iteration.prefill is None:
        return engine.advance(*_step(engine, iteration))
    chunks = _chunks(engine, iteration.prefill, prompts, rows)
    return engine.read(chunks, len(iteration.prefill.chunks))


def prepare_all(engine: Engine, step_tokens: int) -> None:
    """Capture every step and prefill that requests within the engine's capacity may need."""
    lengths = range(1, engine.capacity + 1)
    for batch in step_sizes(engine.slots):
        for bucket in sorted({engine.bucket(length) for length in lengths}):
            engine.prepare(batch, bucket)
    ends = sorted({_attention_length(engine, length) for length in lengths})
    for rows, tokens in prefill_shapes(step_tokens):
        for end in ends:
            # More tokens are chosen only for a chunk that does not fit half of them.
            if end >= min(tokens, engine.capacity) and rows < 2 * engine.slots:
                engine.prepare_prompts(rows, tokens, end)


def _prepare(engine: Engine, requests: Sequence[ServingRequest], step_tokens: int) -> None:
    """Capture all steps and prefills of these requests."""
    iterations = list(Scheduler(requests, engine.slots, step_tokens).iterations())
    for step in sorted(
        {_step(engine, iteration) for iteration in iterations if iteration.prefill is None}
    ):
        engine.prepare(*step)
    prefills = [iteration.prefill for iteration in iterations if iteration.prefill is not None]
    shapes = {(p.rows, p.tokens, _attention_length(engine, p.longest)) for p in prefills}
    for shape in sorted(shapes):
        engine.prepare_prompts(*shape)


def _step(engine: Engine, iteration: Iteration) -> tuple[int, int]:
    """Batch size and bucket of an iteration's step."""
    batch = min(size for size in step_sizes(engine.slots) if size >= iteration.decoding)
    return batch, engine.bucket(iteration.longest)


def _chunks(
    engine: Engine, prefill: PrefillBatch, prompts: torch.Tensor, rows: Sequence[int]
) -> Chunks:
    """Build the engine's input of a prefill. Padded rows use the last position, never read."""
    table = [[row, p.start, p.count, p.slot] for row, p in zip(rows, prefill.chunks, strict=True)]
    table += [[0, engine.capacity - 1, 1, 0]] * (prefill.rows - len(prefill.chunks))
    on_host = torch.tensor(table, dtype=torch.int64).T.contiguous()
    if prompts.is_cuda:  # a copy from pinned memory doesn't wait for the work before it
        on_host = on_host.pin_memory()
    index, start, count, slot = on_host.to(prompts.device, non_blocking=True)
    within = torch.arange(prefill.tokens, device=prompts.device)
    columns = (start[:, None] + within).clamp(max=prompts.shape[1] - 1)
    return Chunks(
        prompts[index[:, None], columns],
        start,
        count,
        slot,
        _attention_length(engine, prefill.longest),
    )


def _attention_length(engine: Engine, length: int) -> int:
    """Attention length of a chunk that ends at `length`, rounded up to need few graphs."""
    return min(max(_MIN_ATTENTION_TOKENS, 1 << (length - 1).bit_length()), engine.capacity)
