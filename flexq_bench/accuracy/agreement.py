"""Agreement of a quantized model's predictions and layers with the original's, on the same inputs.

What is kept of the original is not its logits (a vocabulary of numbers a token) but the input of
its output head, from which the head, kept too, computes them again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.perplexity import PerplexityResult, perplexity
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.smoothing import Folds

_ROWS_AT_ONCE = 512
_HEAD_TOLERANCE = 1e-2  # of the largest logit: FP16 logits recomputed in one row are not bit-equal


@dataclass(frozen=True, slots=True)
class Agreement:
    """Means over the predicted tokens of each segment, in the text's order.

    kl: KL divergence of the quantized model's distribution from the original's, nats a token.
    top1: share of tokens for which both find the same token the likeliest.
    """

    kl: tuple[float, ...]
    top1: tuple[float, ...]

    @property
    def mean_kl(self) -> float:
        return sum(self.kl) / len(self.kl)

    @property
    def mean_top1(self) -> float:
        return sum(self.top1) / len(self.top1)


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """The original model's predictions on the segments of a text.

    head: a copy of its output head. hidden: what the head gets, [context - 1, hidden] a segment.
    """

    head: OutputHead
    hidden: tuple[torch.Tensor, ...]
    result: PerplexityResult


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Function from the last hidden state to logits.

    cap: magnitude that logits come close to and never pass (Gemma 2: cap · tanh(logits / cap));
    None: there is none. divisor: of what the layer gives (Granite).
    """

    layer: nn.Module
    cap: float | None
    divisor: float

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] -> [rows, vocabulary], on the device of `hidden`."""
        plain: torch.Tensor = self.layer.to(hidden.device)(hidden) / self.divisor
        return plain if self.cap is None else torch.tanh(plain / self.cap) * self.cap


class AgreementMeter:
    """Compares the logits of another model with a reference: `perplexity` calls it a segment."""

    def __init__(self, reference: ReferenceLogits) -> None:
        self._reference = reference
        self._kl: list[float] = []
        self._top1: list[float] = []

    def __call__(self, segment: int, logits: torch.Tensor) -> None:
        hidden = self._reference.hidden[segment].to(logits.device)
        kl, same = 0.0, 0
        for rows, states in zip(
            torch.split(logits, _ROWS_AT_ONCE), torch.split(hidden, _ROWS_AT_ONCE), strict=True
        ):
            ours = rows.float().log_softmax(-1)
            theirs = self._reference.head.logits(states).float().log_softmax(-1)
            kl += float((theirs.exp() * (theirs - ours)).sum())
            same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self._kl.append(kl / logits.shape[0])
        self._top1.append(same / logits.shape[0])

    def result(self) -> Agreement:
        return Agreement(tuple(self._kl), tuple(self._top1))


def record_reference(
    model: Any, tokens: torch.Tensor, *, context: int, max_tokens: int | None = None
) -> ReferenceLogits:
    """The original model's perplexity, and what it takes to compare others with its predictions.

    Arguments as of `perplexity`. Raises AccuracyError as that does, and if the model computes more
    than its output head between the last hidden state and the logits.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise AccuracyError(f"{type(model).__name__} has no output head: it predicts no tokens")
    cap = getattr(model.config, "final_logit_softcapping", None)
    divisor = getattr(model.config, "logits_scaling", 1.0)
    kept = OutputHead(copy.deepcopy(head), cap, divisor)
    hidden: list[torch.Tensor] = []

    def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        hidden.extend(inputs[0].detach()[:, :-1].to("cpu", copy=True))

    def check(segment: int, logits: torch.Tensor) -> None:
        if not bool(torch.isfinite(logits).all()):
            raise AccuracyError(
                f"{type(model).__name__} predicts NaN or infinity as it is: there is nothing to "
                "compare with; a --dtype of more range may help"
            )
        again = kept.logits(hidden[segment][:1].to(logits.device))[0]
        if segment == 0 and not _close(again, logits[0]):
            raise AccuracyError(
                f"the logits of {type(model).__name__} are not what its output head gives: "
                "predictions of this architecture can't be compared"
            )

    hook = head.register_forward_pre_hook(keep)
    try:
        result = perplexity(model, tokens, context=context, max_tokens=max_tokens, on_logits=check)
    finally:
        hook.remove()
    return ReferenceLogits(kept, tuple(hidden), result)


@torch.no_grad()
def layer_errors(
    original: Any, quantized: nn.Module, segment: torch.Tensor, folds: Folds
) -> Mapping[str, float]:
    """Squared error of each quantized layer's output over its squared output, by its name.

    Both models get the original's inputs, so a layer answers for itself alone. segment: [T],
    int64. folds: what the quantized model's layers have their inputs and outputs divided by. A
    layer whose output is all zero has error 0 if the other's is, else infinity. Raises
    QuantizeError if the original has no layer map.
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
            given, expected = inputs[0], output.double()
            if name in folds.inputs:
                given = (given / folds.inputs[name]).to(given.dtype)
            actual = other(given) * folds.outputs.get(name, 1.0)
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


def _close(again: torch.Tensor, logits: torch.Tensor) -> bool:
    largest = float(logits.float().abs().max())
    return float((again.float() - logits.float()).abs().max()) <= _HEAD_TOLERANCE * max(
        largest, 1.0
    )
