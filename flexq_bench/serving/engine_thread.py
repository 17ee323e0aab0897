"""The thread that runs an engine: requests enter and leave the batch between its passes."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexq_bench.decode.continuous_batching import Iteration, Scheduler
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.requests import ServingRequest
from flexq_bench.decode.serving import run
from flexq_bench.errors import InfrastructureError, one_line
from flexq_bench.serving.generation import (
    Chosen,
    End,
    Event,
    Generation,
    Sampler,
)
from flexq_bench.serving.sampling import choose, score

log = logging.getLogger(__name__)

Receive = Callable[[Event], None]  # called in the engine's thread


@dataclass(frozen=True, slots=True)
class _Request:
    generation: Generation
    sampler: Sampler
    receive: Receive


class EngineThread:
    """Continuous batching of requests as they come, on an engine whose passes are prepared.

    on_pass: called after the tokens of a pass. on_failure: called if a pass fails; no request gets
    a token from then on.
    """

    def __init__(
        self,
        engine: Engine,
        step_tokens: int,
        *,
        on_pass: Callable[[], None] = lambda: None,
        on_failure: Callable[[InfrastructureError], None] = lambda error: None,
    ) -> None:
        self._engine, self._step_tokens = engine, step_tokens
        self._scheduler = Scheduler([], engine.slots, step_tokens)
        self._on_pass, self._on_failure = on_pass, on_failure
        self._prompts = torch.zeros(
            engine.slots, engine.capacity, dtype=torch.int32, device=engine.model.device
        )
        self._requests: dict[int, _Request] = {}
        self._lock = threading.Lock()  # of _requests
        self._numbers = itertools.count()
        self._changes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._decoding: dict[int, int] = {}  # requests by slot, after their first token
        self._scored: dict[int, tuple[Chosen, ...]] = {}  # prompts of requests
        self._is_closing = False
        self.failure: InfrastructureError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, generation: Generation, receive: Receive) -> int:
        """Queue a sequence; returns its number. After a failure nothing more happens to it."""
        lengths = ServingRequest(len(generation.prompt), generation.new_tokens)
        sampler = Sampler(generation.sampling, generation.sequence)
        number = next(self._numbers)
        with self._lock:
            self._requests[number] = _Request(generation, sampler, receive)
        self._changes.put(lambda: self._scheduler.add(number, lengths))
        return number

    def cancel(self, number: int) -> None:
        """Drop a sequence that nobody waits for; does nothing if it is finished."""
        self._changes.put(lambda: self._drop(number))

    def close(self) -> None:
        """End the thread after the pass that runs now."""

        def end() -> None:
            self._is_closing = True

        self._changes.put(end)
        self._thread.join()

    def _run(self) -> None:
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
        except Exception as error:  # of any class: every request must learn of it
            log.exception("the engine failed")
            self.failure = InfrastructureError(f"the engine failed: {one_line(error)}")
            self._on_failure(self.failure)

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
        self._on_pass()

    def _score(self, slot: int, generation: Generation) -> tuple[Chosen, ...]:
        """Log-probabilities of a prompt's tokens after the first. It is prefilled again later."""
        tokens, count = generation.prompt[1:], generation.sampling.logprobs or 0
        scored: list[Chosen] = []
        for start in range(0, len(tokens), self._step_tokens):
            span = slice(start, min(start + self._step_tokens, len(tokens)))
            ids = self._prompts[slot : slot + 1, span]
            logits = self._engine.logits(ids, first_slot=slot, start=start)[0]
            scored += score(logits, tokens[span], count)
        return tuple(scored)

    def _choose(self, logits: torch.Tensor, rows: list[tuple[int, int, int]]) -> list[Chosen]:
        """Choose the token of each row, slot and request, and give it to the next step."""
        samplers = [self._requests[index].sampler for _, _, index in rows]
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
