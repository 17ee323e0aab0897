"""Agreement of a quantized model's predictions and layers with the original's, on equal inputs.

The original's logits are not stored (one number per token and word of the vocabulary). Stored are
the inputs of its output head and the head itself, from which they are recomputed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.perplexity import PerplexityResult, perplexity, segments
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.smoothing import Folds

_ROWS_PER_BATCH = 512
_TOP_TOKENS = 5  # size of the compared sets of likeliest tokens
_MAX_HEAD_DIFFERENCE = 1e-2  # of the largest logit; recomputed FP16 logits are not bit-equal


@dataclass(frozen=True, slots=True)
class Agreement:
    """Means over the predicted tokens of each segment, in the text's order.

    kl: KL divergence of the quantized model's distribution from the original's, nats per token.
    top1: share of tokens for which both models have the same likeliest token. top5: share of the
    original's five likeliest tokens that are among the quantized model's five. rank_change: log2 of
    the true token's rank over its rank in the original; 1: twice as far from the top. token_kl,
    token_loss: float32 [segments, context - 1], nats: KL divergence, and decrease of the true
    token's log-probability.
    """

    kl: tuple[float, ...]
    top1: tuple[float, ...]
    top5: tuple[float, ...]
    rank_change: tuple[float, ...]
    token_kl: NDArray[np.float32]
    token_loss: NDArray[np.float32]

    @property
    def mean_kl(self) -> float:
        return sum(self.kl) / len(self.kl)


@dataclass(slots=True)
class ReferenceLogits:
    """The original model's predictions on the segments of a text that were computed so far.

    head: a copy of its output head. hidden: inputs of the head, [context - 1, hidden] per segment.
    targets: the predicted tokens, int64 [context - 1] per segment. result: its perplexity on them.
    """

    head: OutputHead
    hidden: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    result: PerplexityResult

    def first(self, count: int) -> ReferenceLogits:
        """Return the predictions on the first segments only."""
        result = self.result.first(count)
        return ReferenceLogits(self.head, self.hidden[:count], self.targets[:count], result)

    def of(self, places: Sequence[int]) -> ReferenceLogits:
        """Return the predictions on the segments at these places, in this order."""
        hidden, targets = (tuple(x[i] for i in places) for x in (self.hidden, self.targets))
        return ReferenceLogits(self.head, hidden, targets, self.result.of(places))

    def extend(self, more: ReferenceLogits) -> None:
        """Add the segments that follow."""
        self.hidden += more.hidden
        self.targets += more.targets
        self.result = self.result.followed_by(more.result)


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Function from the last hidden state to logits.

    cap: bound of the magnitude of logits (Gemma 2: cap · tanh(logits / cap)); None: there is none.
    divisor: of the layer's output (Granite, Cohere).
    """

    layer: nn.Module
    cap: float | None
    divisor: float

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden [rows, hidden] to [rows, vocabulary], on the device of `hidden`."""
        plain: torch.Tensor = self.layer.to(hidden.device)(hidden) / self.divisor
        return plain if self.cap is None else torch.tanh(plain / self.cap) * self.cap


class AgreementMeter:
    """Compares the logits of another model with a reference; `perplexity` calls it per segment.

    Segments must come in the reference's order. The reference may be extended between them. parts:
    the values of the segments so far.
    """

    def __init__(self, reference: ReferenceLogits) -> None:
        self._reference = reference
        self.parts: list[TokenValues] = []

    def __call__(self, _: int, logits: torch.Tensor) -> None:
        segment = len(self.parts)
        hidden = self._reference.hidden[segment].to(logits.device)
        targets = self._reference.targets[segment].to(logits.device)
        parts = [
            _compared(rows, self._reference.head.logits(states), wanted)
            for rows, states, wanted in zip(
                torch.split(logits, _ROWS_PER_BATCH),
                torch.split(hidden, _ROWS_PER_BATCH),
                torch.split(targets, _ROWS_PER_BATCH),
                strict=True,
            )
        ]
        self.parts.append(
            TokenValues(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))
        )

    def result(self) -> Agreement:
        """Return the agreement on the segments so far, at least one."""
        means = [tuple(float(v.double().mean()) for v in part) for part in self.parts]
        kl, top1, top5, rank_change, _ = zip(*means, strict=True)
        return Agreement(
            kl,
            top1,
            top5,
            rank_change,
            np.stack([part.kl.numpy() for part in self.parts]),
            np.stack([part.loss.numpy() for part in self.parts]),
        )


class TokenValues(NamedTuple):
    """Values of each token, float32 [tokens]."""

    kl: torch.Tensor
    top1: torch.Tensor
    top5: torch.Tensor
    rank_change: torch.Tensor
    loss: torch.Tensor


def _compared(logits: torch.Tensor, original: torch.Tensor, targets: torch.Tensor) -> TokenValues:
    """Compare logits [tokens, vocabulary] of both models, given the true tokens [tokens]."""
    ours, theirs = (x.float().log_softmax(-1) for x in (logits, original))
    kl = divergence(ours, theirs)
    count = min(_TOP_TOKENS, ours.shape[-1])
    our_best, their_best = (x.topk(count, dim=-1).indices for x in (ours, theirs))
    shared = (our_best[:, :, None] == their_best[:, None, :]).any(-1).float().mean(-1)
    our_true, their_true = (x.gather(1, targets[:, None]) for x in (ours, theirs))
    our_rank, their_rank = (
        1 + (x > true).sum(-1).float() for x, true in ((ours, our_true), (theirs, their_true))
    )
    return TokenValues(
        kl,
        (our_best[:, 0] == their_best[:, 0]).float(),
        shared,
        (our_rank / their_rank).log2(),
        (their_true - our_true)[:, 0],
    )


def divergence(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """KL divergence of our distributions from theirs, nats [rows], of log-probabilities."""
    # Due to rounding, the divergence of equal distributions may be slightly negative.
    return (theirs.exp() * (theirs - ours)).sum(-1).clamp_min(0)


def _logit_divisor(config: Any) -> float:
    factor = getattr(config, "logit_scale", None)  # of Cohere
    if isinstance(factor, int | float) and factor:
        return 1 / factor
    return float(getattr(config, "logits_scaling", 1.0))


def record_reference(
    model: Any,
    tokens: torch.Tensor,
    *,
    context: int,
    max_tokens: int | None = None,
    bos: int | None = None,
    on_segment: Callable[[int], None] | None = None,
) -> ReferenceLogits:
    """Compute the original model's perplexity, and the data to compare other models with it.

    Arguments as of `perplexity`. on_segment: called with each segment's number. Raises
    AccuracyError like `perplexity`, and if the model computes more than its output head between
    the last hidden state and the logits.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise AccuracyError(f"{type(model).__name__} has no output head: it predicts no tokens")
    cap = getattr(model.config, "final_logit_softcapping", None)
    stored_head = OutputHead(copy.deepcopy(head), cap, _logit_divisor(model.config))
    hidden: list[torch.Tensor] = []

    def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        hidden.extend(inputs[0].detach()[:, :-1].to("cpu", copy=True))

    def check(segment: int, logits: torch.Tensor) -> None:
        if not bool(torch.isfinite(logits).all()):
            raise AccuracyError(
                f"{type(model).__name__} predicts NaN or infinity as it is: there is nothing to "
                "compare with; a --dtype of more range may help"
            )
        recomputed = stored_head.logits(hidden[segment][:1].to(logits.device))[0]
        if segment == 0 and not _close(recomputed, logits[0]):
            raise AccuracyError(
                f"the logits of {type(model).__name__} are not what its output head gives: "
                "predictions of this architecture can't be compared"
            )
        if on_segment is not None:
            on_segment(segment)

    hook = head.register_forward_pre_hook(keep)
    try:
        result = perplexity(
            model, tokens, context=context, max_tokens=max_tokens, on_logits=check, bos=bos
        )
    finally:
        hook.remove()
    targets = tuple(s[1:] for s in segments(tokens, context, max_tokens, bos=bos))
    return ReferenceLogits(stored_head, tuple(hidden), targets, result)


@torch.no_grad()
def layer_errors(
    original: Any, quantized: nn.Module, segment: torch.Tensor, folds: Folds
) -> Mapping[str, float]:
    """Return each quantized layer's squared output error over its squared output, by layer name.

    Layers of both models get the original's inputs, so the error of a layer doesn't depend on
    others. segment: [T], int64. folds: of the quantized model. If a layer's output is all zero, the
    error is 0 if the other output is zero too, else infinity. Raises QuantizeError if the original
    has no layer map.
    """
    errors: dict[str, float] = {}
    hooks = []
    for site in map_model(original).sites:
        other = quantized.get_submodule(site.name)

        def compare(
            _: nn.Module,
            inputs: tuple[torch.Tensor, ...],
            output: torch.Tensor,
            name: str = site.name,
            other: nn.Module = other,
        ) -> None:
            layer_input, expected = folds.fold_input(name, inputs[0]), output.double()
            actual = folds.unfold_output(name, other(layer_input).double())
            wrong = float((actual - expected).square().sum())
            power = float(expected.square().sum())
            errors[name] = wrong / power if power else (float("inf") if wrong else 0.0)

        hooks.append(original.get_submodule(site.name).register_forward_hook(compare))
    try:
        device = next(original.parameters()).device
        original(input_ids=segment.to(device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return errors


def _close(recomputed: torch.Tensor, logits: torch.Tensor) -> bool:
    largest = float(logits.float().abs().max())
    return float((recomputed.float() - logits.float()).abs().max()) <= _MAX_HEAD_DIFFERENCE * max(
        largest, 1.0
    )
