"""Perplexity as defined by GPTQ's evaluation (arXiv:2210.17323, section 5).

The text is one sequence of tokens, cut into segments of equal length that don't overlap; a rest at
the end is not used. The first token of a segment is not predicted. If the tokenizer begins texts
with a special token (BOS), it is the first one of each segment, because a model that was trained
with it predicts badly without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.positions import first_positions
from flexq_bench.schemes.calibration import segments_at_once

GPTQ_CONTEXT = 2048  # tokens per segment
_ROWS_PER_BATCH = 512  # rows of logits that are processed together

OnLogits = Callable[[int, torch.Tensor], None]


def perplexity_of(mean_nll: float) -> float:
    """Return exp of the mean; infinite beyond the range of a float, NaN if a logit is NaN."""
    return math.exp(mean_nll) if not mean_nll > 700 else math.inf


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """Mean negative log likelihood of each segment in nats per token, in the text's order.

    context: tokens per segment, of which context - 1 are predicted. seconds: of the model's
    computation only. by_position: for each segment the mean of each part of first_positions; empty:
    unknown.
    """

    nll: tuple[float, ...]
    context: int
    seconds: float
    by_position: tuple[tuple[float, ...], ...] = ()

    @property
    def tokens(self) -> int:
        """Number of predicted tokens."""
        return len(self.nll) * (self.context - 1)

    @property
    def mean_nll(self) -> float:
        return math.fsum(self.nll) / len(self.nll)

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.mean_nll)

    @property
    def standard_error(self) -> float | None:
        """Standard error of the perplexity over segments (delta method); None: one segment."""
        count = len(self.nll)
        if count < 2:
            return None
        mean = self.mean_nll
        variance = math.fsum((value - mean) ** 2 for value in self.nll) / (count - 1)
        return self.perplexity * math.sqrt(variance / count)

    def followed_by(self, more: PerplexityResult) -> PerplexityResult:
        """Return the result on these segments followed by those of `more`."""
        return PerplexityResult(
            self.nll + more.nll,
            self.context,
            self.seconds + more.seconds,
            self.by_position + more.by_position,
        )

    def first(self, count: int) -> PerplexityResult:
        """Return the result on the first `count` segments."""
        return replace(self, nll=self.nll[:count], by_position=self.by_position[:count])

    def of(self, places: Sequence[int]) -> PerplexityResult:
        """Return the result on the segments at these places, in this order."""
        parts = self.by_position
        return replace(
            self,
            nll=tuple(self.nll[i] for i in places),
            by_position=tuple(parts[i] for i in places) if parts else (),
        )

    @property
    def tokens_per_s(self) -> float:
        return len(self.nll) * self.context / self.seconds


def segment_count(
    tokens: int, context: int, max_tokens: int | None = None, *, bos: int | None = None
) -> int:
    """Return the number of whole segments of `context` tokens to evaluate.

    max_tokens: maximum number of predicted tokens, rounded down to whole segments, but at least
    one. bos: token before each segment, which counts as one of its `context` tokens and is not part
    of the text; None: there is none. Raises AccuracyError if the text is shorter than a segment, or
    a segment than two tokens.
    """
    if context < 2:
        raise AccuracyError(
            f"a context of {context} predicts nothing: at least 2 tokens are needed"
        )
    whole = tokens // text_length(context, bos)
    if whole == 0:
        raise AccuracyError(
            f"{tokens} tokens are fewer than one segment of {context}: give a longer text or a "
            "shorter --context"
        )
    return whole if max_tokens is None else min(whole, max(1, max_tokens // (context - 1)))


def text_length(context: int, bos: int | None) -> int:
    """Return the number of tokens of the text in a segment of `context` tokens."""
    return context if bos is None else context - 1


@torch.no_grad()
def perplexity(
    model: nn.Module,
    tokens: torch.Tensor,
    *,
    context: int = GPTQ_CONTEXT,
    max_tokens: int | None = None,
    on_logits: OnLogits | None = None,
    at_once: int | None = None,
    bos: int | None = None,
) -> PerplexityResult:
    """Compute the perplexity of a causal language model of transformers on a text.

    tokens: [T], int64, the whole text. max_tokens, bos: see segment_count. on_logits: called with
    each segment's number and its logits [context - 1, vocabulary]; its time is not counted.
    at_once: segments that the model computes together; None: see segments_at_once. Raises
    AccuracyError as segment_count.
    """
    was_training = model.training
    model.eval()
    nll: list[float] = []
    by_position: list[tuple[float, ...]] = []
    # The targets begin at position 1, so the target of position p has index p - 1.
    parts = [max(0, first - 1) for first in first_positions(context)]
    seconds = 0.0
    try:
        whole = torch.stack(list(segments(tokens, context, max_tokens, bos=bos)))
        for together in torch.split(whole, at_once or segments_at_once(model, context)):
            started = time.monotonic()
            ids = together.to(_device(model))
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            first = len(nll)
            for ours, wanted in zip(logits, ids[:, 1:], strict=True):
                losses = _nll(ours, wanted)
                nll.append(float(losses.mean()))
                ends = (*parts[1:], context - 1)
                by_position.append(
                    tuple(
                        float(losses[begin:end].mean())
                        for begin, end in zip(parts, ends, strict=True)
                    )
                )
            seconds += time.monotonic() - started
            if on_logits is not None:
                for index, ours in enumerate(logits, start=first):
                    on_logits(index, ours)
    finally:
        model.train(was_training)
    return PerplexityResult(tuple(nll), context, seconds, tuple(by_position))


def segments(
    tokens: torch.Tensor,
    context: int,
    max_tokens: int | None = None,
    *,
    bos: int | None = None,
) -> Iterator[torch.Tensor]:
    """Return the segments [context] of tokens [T] to evaluate. Raises as segment_count."""
    count = segment_count(tokens.numel(), context, max_tokens, bos=bos)
    length = text_length(context, bos)
    cut = tokens[: count * length].view(count, length)
    if bos is not None:
        cut = torch.cat((cut.new_full((count, 1), bos), cut), dim=1)
    return iter(cut)


def _nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the negative log likelihood of each target, float64, on the CPU; synchronizes."""
    losses = [
        functional.cross_entropy(rows.float(), wanted, reduction="none")
        for rows, wanted in zip(
            torch.split(logits, _ROWS_PER_BATCH), torch.split(targets, _ROWS_PER_BATCH), strict=True
        )
    ]
    return torch.cat(losses).double().cpu()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
