"""The thread that runs an engine: requests enter and leave the batch between its passes."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from flexq_bench.decode.continuous_batching import Iteration, Scheduler
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.requests import ServingRequest
from flexq_bench.decode.serving import run
from flexq_bench.errors import InfrastructureError, one_line
from flexq_bench.serving.sampling import Chosen, Sampler, choose, score

log = logging.getLogger(__name__)

End = Literal["stop", "length"]


class QueueFullError(InfrastructureError):
    """Raised where as many requests wait as the server takes."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A sequence to decode: at most new_tokens after prompt, until one of `ends`.

    scores_prompt: also report the log-probabilities of the prompt's tokens.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    sampler: Sampler
    ends: frozenset[int]
    scores_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """A token of an answer. end: why it is the last one; None: it is not.

    prompt: before the first token, the prompt's after its first, if it is scored.
    """

    chosen: Chosen
    end: End | None
    prompt: tuple[Chosen, ...] = ()


# Called in the engine's thread with each event, or with the error that ended all requests.
Receive = Callable[[Event | InfrastructureError], None]


@dataclass(frozen=True, slots=True)
class _Request:
    generation: Generation
    receive: Receive


class EngineThread:
    """Continuous batching of requests as they come, on an engine whose passes are prepared.

    max_waiting: requests that wait for a slot; `most` are served or wait. on_failure: called once
    if a pass fails.
    """

    def __init__(
        self,
        engine: Engine,
        step_tokens: int,
        max_waiting: int,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._step_tokens = engine, step_tokens
        self.most = engine.slots + max_waiting
        self._scheduler = Scheduler([], engine.slots, step_tokens)
        self._on_failure = on_failure
        self._prompts = torch.zeros(
            engine.slots, engine.capacity, dtype=torch.int32, device=engine.model.device
        )
        self._requests: dict[int, _Request] = {}
        self._lock = threading.Lock()  # of _requests and failure
        self._numbers = itertools.count()
        self._changes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._decoding: dict[int, int] = {}  # requests by slot, after their first token
        self._scored: dict[int, tuple[Chosen, ...]] = {}  # prompts of requests
        self._is_closing = False
        self.failure: InfrastructureError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> int:
        """Tokens of a sequence, prompt included."""
        return self._engine.capacity

    def counts(self) -> tuple[int, int]:
        """Sequences that are decoded now, and those that wait."""
        requests = len(self._requests)
        running = min(requests, self._engine.slots)
        return running, requests - running

    def submit(self, generation: Generation, receive: Receive) -> int:
        """Queue a sequence; returns its number. Raises QueueFullError, or the engine's failure."""
        lengths = ServingRequest(len(generation.prompt), generation.new_tokens)
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if len(self._requests) >= self.most:
                raise QueueFullError(f"{self.most} requests are served or wait: try again later")
            number = next(self._numbers)
            self._requests[number] = _Request(generation, receive)
        self._changes.put(lambda: self._scheduler.add(number, lengths))
        return number

    def cancel(self, number: int) -> None:
        """Drop a sequence that nobody waits for; does nothing if it is finished."""
        self._changes.put(lambda: self._drop(number))

    def close(self) -> None:
        """End the thread after the pass that runs now; waiting requests get an error."""

        def end() -> None:
            self._is_closing = True

        self._changes.put(end)
        self._thread.join()

    def _run(self) -> None:
        error = InfrastructureError("the server ends")
        try:
            if self._prompts.is_cuda:
                torch.cuda.set_device(self._prompts.device)
            while not self._is_closing:
                self._take_changes(wait=True)
                for iteration in self._scheduler.iterations():
                    self._pass(iteration)
                    self._take_changes(wait=False)
                    if self._is_closing:
                        break
        except Exception as failure:  # of any class: every request must learn of it
            log.exception("the engine failed")
            error = InfrastructureError(f"the engine failed: {one_line(failure)}")
        with self._lock:
            self.failure = error
            left, self._requests = list(self._requests.values()), {}
        for request in left:
            request.receive(error)
        if not self._is_closing:
            self._on_failure()

    def _take_changes(self, *, wait: bool) -> None:
        if wait:
            self._changes.get()()
        while not self._changes.empty():
            self._changes.get()()

    def _pass(self, iteration: Iteration) -> None:
        """Run an iteration, choose the tokens that it predicts, and deliver them."""
        for admission in iteration.admitted:
            generation = self._requests[admission.index].generation
            prompt = torch.tensor(generation.prompt, dtype=torch.int32)
            self._prompts[admission.slot, : len(prompt)] = prompt
            if generation.scores_prompt:
                self._scored[admission.index] = self._score(admission.slot, generation)
        chunks = () if iteration.prefill is None else iteration.prefill.chunks
        logits = run(self._engine, iteration, self._prompts, [chunk.slot for chunk in chunks])
        if iteration.prefill is None:
            rows = [(slot, slot, index) for slot, index in self._decoding.items()]
        else:
            started = set(iteration.started)
            rows = [(i, c.slot, c.index) for i, c in enumerate(chunks) if c.index in started]
            self._decoding |= {slot: index for _, slot, index in rows}
        chosen = self._choose(logits, rows)
        last = {index for _, index in iteration.finished}
        for (_, slot, index), choice in zip(rows, chosen, strict=True):
            request = self._requests[index]
            is_end = choice.token in request.generation.ends
            end: End | None = "stop" if is_end else "length" if index in last else None
            if end is not None:
                self._leave(slot, index, is_freed=index in last)
            request.receive(Event(choice, end, self._scored.pop(index, ())))

    def _score(self, slot: int, generation: Generation) -> tuple[Chosen, ...]:
        """Log-probabilities of a prompt's tokens after the first. It is prefilled again later."""
        tokens, count = generation.prompt[1:], generation.sampler.sampling.logprobs or 0
        scored: list[Chosen] = []
        for start in range(0, len(tokens), self._step_tokens):
            span = slice(start, min(start + self._step_tokens, len(tokens)))
            ids = self._prompts[slot : slot + 1, span]
            logits = self._engine.logits(ids, first_slot=slot, start=start)[0]
            scored += score(logits, tokens[span], count)
        return tuple(scored)

    def _choose(self, logits: torch.Tensor, rows: list[tuple[int, int, int]]) -> list[Chosen]:
        """Choose the token of each row, slot and request, and give it to the next step."""
        samplers = [self._requests[index].generation.sampler for _, _, index in rows]
        own = [i for i, sampler in enumerate(samplers) if not sampler.sampling.is_plain]
        if own:
            places = [rows[i][0] for i in own]
            described = choose(logits[places], [samplers[i] for i in own])
            slots = [rows[i][1] for i in own]
            tokens = [choice.token for choice in described]
            self._engine.tokens[slots] = torch.tensor(tokens, dtype=torch.int32).to(logits.device)
        greedy = self._engine.tokens.tolist()
        chosen = [Chosen(greedy[slot]) for _, slot, _ in rows]
        for i, choice in zip(own, described if own else (), strict=True):
            chosen[i] = choice
        return chosen

    def _drop(self, number: int) -> None:
        slot = self._scheduler.remove(number)
        if slot is not None:
            self._leave(slot, number, is_freed=True)
        self._scored.pop(number, None)
        with self._lock:
            self._requests.pop(number, None)

    def _leave(self, slot: int, index: int, *, is_freed: bool) -> None:
        if not is_freed:
            self._scheduler.remove(index)
        self._decoding.pop(slot, None)
        self._engine.clear(slot)
        with self._lock:
            self._requests.pop(index, None)
