"""Requests to an engine and the tokens that it gives, as values of both sides of the link."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from flexq_bench.errors import InfrastructureError

End = Literal["stop", "length"]


class QueueFullError(InfrastructureError):
    """Raised where as many requests wait as the server takes."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of the choice of tokens.

    temperature: 0 is greedy. top_p: smallest set of tokens with this probability. top_k: most
    likely tokens to draw from, 0: all. seed: of the draws; None: random. logprobs: number of
    alternatives to report with each token's log-probability; None: neither is reported.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None

    @property
    def is_plain(self) -> bool:
        """True if the engine's own choice, the likeliest token, is all that is needed."""
        return self.temperature == 0 and self.logprobs is None


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token. logprob: natural log of the model's probability (temperature 1); None: not
    requested. top: the likeliest tokens with theirs, in falling order.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The choices of one sequence. They depend on its seed and logits, not on other sequences."""

    def __init__(self, sampling: Sampling, sequence: int = 0) -> None:
        self.sampling = sampling
        seed = None if sampling.seed is None else f"{sampling.seed} {sequence}"
        self._random = random.Random(seed)

    def draw(self) -> float:
        """Return the next uniform number in [0, 1)."""
        return self._random.random()


@dataclass(frozen=True, slots=True)
class Generation:
    """A sequence to decode: at most new_tokens after prompt, until one of `ends`.

    sequence: number of the answer to the same prompt, of which each has draws of its own.
    scores_prompt: also report the log-probabilities of the prompt's tokens.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    sampling: Sampling
    ends: frozenset[int]
    sequence: int = 0
    scores_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """A token of an answer. end: why it is the last one; None: it is not.

    prompt: before the first token, the prompt's after its first, if it is scored.
    """

    chosen: Chosen
    end: End | None
    prompt: tuple[Chosen, ...] = ()
