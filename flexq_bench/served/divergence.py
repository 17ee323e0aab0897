"""Divergence of two engines' predictions, from the log-probabilities of the likeliest tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from flexq_bench.served.client import Answer, TokenLogprob

_LEAST = 1e-9  # probability that is told apart from 0


def answer_divergence(base: Answer, head: Answer) -> tuple[float, int] | None:
    """Return the sum of KL(base || head) in nats over positions, and their number; None: unknown.

    Positions are those after the same tokens: up to the first token that differs, itself included.
    """
    pairs = list(zip(base.logprobs, head.logprobs, strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a.token != b.token), len(pairs))
    return summed_divergence(pairs[: same + 1])


def summed_divergence(
    pairs: Iterable[tuple[TokenLogprob, TokenLogprob]],
) -> tuple[float, int] | None:
    """Return the sum of token_divergence over positions, and the number of those that have one.

    None: none has.
    """
    known = [d for ours, theirs in pairs if (d := token_divergence(ours, theirs)) is not None]
    return (math.fsum(known), len(known)) if known else None


def token_divergence(base: TokenLogprob, head: TokenLogprob) -> float | None:
    """A lower bound of KL(base || head) in nats over the vocabulary; None: one reports nothing.

    Tokens that both report count one by one. Those that only base reports are joined, and so is the
    rest of the vocabulary (Cover and Thomas 2006, section 2.7). Head gives the former what makes
    the divergence least, but none of them more than the least likely token that it reports.
    """
    if not base.top or not head.top:
        return None
    ours, theirs = _probabilities(base.top), _probabilities(head.top)
    shared = [token for token in ours if token in theirs]
    only_base = math.fsum(p for token, p in ours.items() if token not in theirs)
    rest = max(0.0, 1.0 - math.fsum(ours.values()))
    free = max(0.0, 1.0 - math.fsum(theirs[token] for token in shared))
    unreported = max(0.0, 1.0 - math.fsum(theirs.values()))
    most = min(unreported, (len(ours) - len(shared)) * min(theirs.values()))
    given = min(most, free * only_base / (only_base + rest)) if only_base else 0.0
    pairs = [(ours[token], theirs[token]) for token in shared]
    pairs += [(only_base, given), (rest, free - given)]
    return max(0.0, math.fsum(p * math.log(p / max(q, _LEAST)) for p, q in pairs if p > _LEAST))


def _probabilities(top: Mapping[str, float]) -> dict[str, float]:
    known = {token: math.exp(min(logprob, 0.0)) for token, logprob in top.items()}
    total = max(1.0, math.fsum(known.values()))  # above 1 if the engine rounds
    return {token: p / total for token, p in known.items()}
