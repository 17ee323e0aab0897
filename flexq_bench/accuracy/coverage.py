"""Coverage of an evaluation: how much of each text was evaluated, and how often each expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flexq_bench.accuracy.bos import TextTokens
from flexq_bench.accuracy.perplexity import text_length
from flexq_bench.schemes.linear_layers import Experts


@dataclass(frozen=True, slots=True)
class TextCoverage:
    """The evaluated part of a text: `tokens` of `of_tokens`, and so on.

    context: tokens of a segment, so that positions 0 to context - 1 occur. vocabulary: different
    tokens; those of all texts for the rare stratum. documents: 0 if they are not known.
    """

    text: str
    tokens: int
    of_tokens: int
    segments: int
    of_segments: int
    documents: int
    of_documents: int
    context: int
    vocabulary: int
    of_vocabulary: int


def text_coverage(name: str, tokens: TextTokens, context: int, segments: int) -> TextCoverage:
    """Return the coverage of a text by its first `segments` in the order of evaluation."""
    length = text_length(context, tokens.bos)
    evaluated, documents = tokens.ids[: segments * length], tokens.documents
    seen, occurring = tokens.vocabulary or (
        np.unique(evaluated.numpy()).size,
        np.unique(tokens.ids.numpy()).size,
    )
    return TextCoverage(
        text=name,
        tokens=evaluated.numel(),
        of_tokens=tokens.ids.numel(),
        segments=segments,
        of_segments=tokens.ids.numel() // length,
        documents=0 if documents is None else np.unique(documents[:segments]).size,
        of_documents=0 if documents is None else np.unique(documents).size,
        context=context,
        vocabulary=seen,
        of_vocabulary=occurring,
    )


def count_expert_tokens(model: nn.Module) -> Mapping[str, NDArray[np.int64]]:
    """Count, from now on, the tokens that a model's routers send to each expert, by block's name.

    Copies of the model are not counted. Empty: the model has no experts.
    """
    counts: dict[str, NDArray[np.int64]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        counts[name] = np.zeros(len(module), np.int64)

        def add(
            called: nn.Module,
            inputs: tuple[torch.Tensor, ...],
            *,
            own: int = id(module),
            total: NDArray[np.int64] = counts[name],
        ) -> None:
            if id(called) == own:
                chosen = inputs[1].detach().flatten().cpu().numpy()
                total += np.bincount(chosen, minlength=total.size)[: total.size]

        module.register_forward_pre_hook(add)
    return counts
