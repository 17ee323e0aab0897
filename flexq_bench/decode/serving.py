"""Serving requests on an engine: prompts and steps take turns, every slot at its own position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexq_bench.decode.engine import Engine
from flexq_bench.decode.requests import Request
from flexq_bench.decode.schedule import Admission, Schedule
from flexq_bench.decode.stopwatch import stopwatch
from flexq_bench.errors import MeasureError

_PROMPT_MULTIPLE = 64  # tokens that prompts are padded to, so that few shapes are met
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Served:
    """latency_s: of each request, from its admission to its last token, in order of requests.

    token_ms: every time between two steps, prompts in between included. seconds: of everything.
    answers: the tokens of each request, int64.
    """

    latency_s: tuple[float, ...]
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


def serve(engine: Engine, requests: Sequence[Request], prompts: torch.Tensor) -> Served:
    """Serve all requests, which wait in order from the beginning.

    prompts: int32 [requests, longest prompt], each as long as its request says. Every slot takes
    part in every step: where nobody waits any more, the emptied ones compute for nothing.
    """
    slots = engine.slots
    for bucket in _buckets(engine, requests):
        engine.prepare(slots, bucket)
    schedule = Schedule(requests, slots)
    watch = stopwatch(engine.model.device)
    began, ended = [0] * len(requests), [0] * len(requests)
    answers: list[torch.Tensor] = [prompts[:0, 0]] * len(requests)
    steps: list[int] = []  # the mark after each
    marks = 0

    def mark() -> int:
        nonlocal marks
        watch.mark()
        marks += 1
        return marks - 1

    def take_answers() -> None:
        for slot, index in schedule.finish():
            ended[index] = latest
            request = requests[index]
            answer = engine.history[slot, request.prompt_tokens : request.length]
            answers[index] = answer.clone()
            engine.clear(slot)

    latest = mark()
    while not schedule.is_done:
        for admission in schedule.admit():
            began[admission.index] = latest
            _read_prompt(engine, admission, prompts)
            latest = mark()
        take_answers()
        if schedule.running:
            engine.advance(slots, engine.bucket(schedule.longest))
            schedule.step()
            latest = mark()
            steps.append(latest)
            take_answers()
    at_ms = np.concatenate([[0.0], np.cumsum(watch.intervals_ms())])
    latencies = tuple(
        float(at_ms[end] - at_ms[start]) / 1000 for start, end in zip(began, ended, strict=True)
    )
    between = tuple(np.diff(at_ms[steps]).tolist())
    return Served(latencies, between, float(at_ms[-1]) / 1000, tuple(answers))


def _read_prompt(engine: Engine, admission: Admission, prompts: torch.Tensor) -> None:
    tokens = admission.request.prompt_tokens
    padded = min(-(-tokens // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE, engine.capacity)
    prompt = torch.zeros(1, padded, dtype=torch.int32, device=prompts.device)
    prompt[0, :tokens] = prompts[admission.index, :tokens]
    lengths = torch.tensor([tokens], device=prompts.device)
    engine.admit(prompt, lengths, torch.tensor([admission.slot], device=prompts.device))


def _buckets(engine: Engine, requests: Sequence[Request]) -> list[int]:
    longest = max(request.length for request in requests)
    return sorted({engine.bucket(length) for length in range(1, longest + 1)})
