"""Divergence of two engines' predictions, from the log-probabilities of the likeliest tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flexq_bench.served.client import Answer, TokenLogprob

_LEAST = 1e-9  # probability that is told apart from 0


def answer_divergence(base: Answer, head: Answer) -> tuple[float, int] | None:
    """Return the sum of KL(base || head) in nats over positions, and their number; None: unknown.

    Positions are those after the same tokens: up to the first token that differs, itself included.
    """
    total, count = 0.0, 0
    for ours, theirs in zip(base.logprobs, head.logprobs, strict=False):
        if (divergence := token_divergence(ours, theirs)) is not None:
            total += divergence
            count += 1
        if ours.token != theirs.token:
            break
    return (total, count) if count else None


def token_divergence(base: TokenLogprob, head: TokenLogprob) -> float | None:
    """KL(base || head) in nats over the tokens that both report and the rest of the vocabulary.

    A lower bound of that over all tokens, since it joins the rest into one (Cover and Thomas 2006,
    section 2.7). None: one reports nothing.
    """
    if not base.top or not head.top:
        return None
    shared = [token for token in base.top if token in head.top]
    ours, theirs = (_with_rest(side.top, shared) for side in (base, head))
    pairs = zip(ours, theirs, strict=True)
    return max(0.0, math.fsum(p * math.log(p / max(q, _LEAST)) for p, q in pairs if p > _LEAST))


def _with_rest(top: Mapping[str, float], shared: Sequence[str]) -> list[float]:
    known = [math.exp(min(top[token], 0.0)) for token in shared]
    total = math.fsum(known)
    known = [p / total for p in known] if total > 1 else known  # rounded by the engine
    return [*known, max(0.0, 1.0 - total)]
