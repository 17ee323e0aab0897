"""Choice of the next token from logits: greedy or drawn, with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexq_bench.serving.generation import Chosen, Sampler, Sampling


def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Chosen]:
    """Choose a token for each row of logits [B, vocab]."""
    log_probabilities = torch.log_softmax(logits.float(), dim=1)
    tokens = logits.argmax(dim=1)
    cut = [row for row, sampler in enumerate(samplers) if _is_cut(sampler.sampling)]
    whole = [
        row
        for row, sampler in enumerate(samplers)
        if sampler.sampling.temperature > 0 and not _is_cut(sampler.sampling)
    ]
    for rows, draw in ((whole, _drawn), (cut, _drawn_of_likeliest)):
        if rows:
            drawn = draw(log_probabilities[rows], [samplers[row] for row in rows])
            tokens[rows] = drawn
    return _described(
        tokens, log_probabilities, [sampler.sampling.logprobs for sampler in samplers]
    )


def score(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[Chosen]:
    """Log-probabilities of given tokens, and of the `count` likeliest, by logits [T, vocab]."""
    log_probabilities = torch.log_softmax(logits.float(), dim=1)
    ids = torch.tensor(tokens, device=logits.device)
    return _described(ids, log_probabilities, [count] * len(tokens))


def _is_cut(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _tempered(log_probabilities: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    temperatures = _column(
        [sampler.sampling.temperature for sampler in samplers], log_probabilities
    )
    return torch.softmax(log_probabilities / temperatures, dim=1)


def _drawn(log_probabilities: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """Invert the cumulative distribution of each row [B, vocab] at a uniform number."""
    return _inverted(_tempered(log_probabilities, samplers), samplers)[:, 0]


def _drawn_of_likeliest(
    log_probabilities: torch.Tensor, samplers: Sequence[Sampler]
) -> torch.Tensor:
    """The same among the tokens that top_p and top_k leave, likeliest first."""
    sorted_rows = _tempered(log_probabilities, samplers).sort(dim=1, descending=True, stable=True)
    probabilities = sorted_rows.values
    before = probabilities.cumsum(dim=1) - probabilities
    vocabulary = probabilities.shape[1]
    kept = before < _column([sampler.sampling.top_p for sampler in samplers], probabilities)
    ranks = torch.arange(vocabulary, device=probabilities.device)
    counts = [sampler.sampling.top_k or vocabulary for sampler in samplers]
    kept &= ranks < _column(counts, probabilities)
    kept[:, 0] = True
    places = _inverted(probabilities * kept, samplers)
    return sorted_rows.indices.gather(1, places)[:, 0]


def _inverted(weights: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """First places [B, 1] at which the cumulative weights exceed a uniform share of their sum."""
    cumulative = weights.double().cumsum(dim=1)
    levels = _column([sampler.draw() for sampler in samplers], cumulative) * cumulative[:, -1:]
    places = torch.searchsorted(cumulative, levels, right=True)
    return places.clamp(max=weights.shape[1] - 1)  # beyond the end if logits are no numbers


def _described(
    tokens: torch.Tensor, log_probabilities: torch.Tensor, counts: Sequence[int | None]
) -> list[Chosen]:
    """counts: alternatives of each row; None: it needs no log-probabilities."""
    reported = [count for count in counts if count is not None]
    ids = tokens.tolist()
    if not reported:
        return [Chosen(token) for token in ids]
    own = log_probabilities.gather(1, tokens[:, None])[:, 0].tolist()
    best = log_probabilities.topk(min(max(reported), log_probabilities.shape[1]), dim=1)
    values, indices = best.values.tolist(), best.indices.tolist()
    return [
        Chosen(token)
        if count is None
        else Chosen(token, logprob, tuple(zip(likely[:count], row[:count], strict=True)))
        for token, count, logprob, row, likely in zip(
            ids, counts, own, values, indices, strict=True
        )
    ]
