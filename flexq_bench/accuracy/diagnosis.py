"""Diagnosis of an accuracy loss: by layer, by other differing settings and tensors, by token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from flexq_bench.accuracy.agreement import Agreement, AgreementMeter, layer_errors, record_reference
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.linear_layers import replace_module
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.smoothing import Folds

_MAX_TOKENS = 1024  # predicted by each restored model
_MAX_RESTORED_LAYERS = 32  # each takes a forward pass
_WORST_TOKENS = 8
_MAX_SHOWN_TOKENS = 12  # before a token with a loss
_MAX_EQUAL_DIFFERENCE = 1e-6  # relative difference of tensors that is ignored
# Fields of a configuration that describe the file and not the function.
_FILE_FIELDS = {"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}


@dataclass(frozen=True, slots=True)
class LayerLoss:
    """One layer.

    error: squared error of its output over its squared output, given the original's inputs.
    kl_restored: mean KL divergence, nats, of the model in which only this layer is replaced by the
    original's; None: not computed.
    """

    layer: str
    error: float
    kl_restored: float | None


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A token. place: index in the text, from 0. loss: decrease of its log-probability, nats."""

    place: int
    token: str
    before: str
    loss: float
    kl: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Diagnosis of a model's accuracy loss.

    kl: mean KL divergence from the original, nats, on the tokens that restored layers are evaluated
    on; None: no layers were restored, `note` gives the reason. layers: the most important first.
    differing: settings and tensors outside the layers that differ from the original's. tokens: the
    worst first.
    """

    scheme: str
    kl: float | None
    layers: tuple[LayerLoss, ...]
    differing: tuple[str, ...]
    tokens: tuple[TokenLoss, ...]
    note: str = ""

    def values(self) -> dict[str, Any]:
        """Return the fields as JSON values: null where a number is not finite."""
        values: dict[str, Any] = _finite(asdict(self))
        return values


@torch.no_grad()
def losses_of_layers(
    original: Any,
    model: Any,
    folds: Folds,
    segments: torch.Tensor,
) -> tuple[float, tuple[LayerLoss, ...]]:
    """Compute the mean KL divergence on the first segments, and each layer's part in it.

    model: quantized or not, of the same architecture as the original. folds: of the model.
    segments: int64 [segments, context]. Layers with the largest errors are restored one by one; the
    list begins with those whose restoration leaves the least divergence. Raises QuantizeError if
    the architecture has no layer map.
    """
    context = segments.shape[1]
    count = max(1, _MAX_TOKENS // context)
    tokens = segments[:count].flatten()
    errors = layer_errors(original, model, segments[0], folds)
    reference = record_reference(original, tokens, context=context)

    def divergence() -> float:
        meter = AgreementMeter(reference)
        perplexity(model, tokens, context=context, on_logits=meter)
        return meter.result().mean_kl

    total = divergence()
    worst = sorted(errors, key=lambda name: _order(errors[name]), reverse=True)
    restored: dict[str, float] = {}
    for name in worst[:_MAX_RESTORED_LAYERS]:
        if errors[name] <= _MAX_EQUAL_DIFFERENCE:
            break
        quantized = model.get_submodule(name)
        replace_module(model, name, _Unfolded(original.get_submodule(name), folds, name))
        try:
            restored[name] = divergence()
        finally:
            replace_module(model, name, quantized)
    layers = [LayerLoss(name, errors[name], restored.get(name)) for name in worst]
    first = sorted((loss for loss in layers if loss.kl_restored is not None), key=_kl_restored)
    return total, (*first, *(loss for loss in layers if loss.kl_restored is None))


def differences_outside_layers(original: Any, model: Any) -> tuple[str, ...]:
    """Return settings and tensors, other than the layers', that differ from the original's."""
    differences = []
    ours, theirs = model.config.to_dict(), original.config.to_dict()
    for name in sorted(ours.keys() | theirs.keys()):
        hidden = name.startswith("_") or name in _FILE_FIELDS
        if not hidden and ours.get(name) != theirs.get(name):
            differences.append(f"{name}: {ours.get(name)}, the original's: {theirs.get(name)}")
    layers = {site.name for site in map_model(original).sites}
    # With duplicates: a tied head is a parameter of its own in a model that doesn't tie it.
    own = model.state_dict()
    for name, tensor in original.state_dict().items():
        if name.rpartition(".")[0] in layers or name not in own:
            continue
        difference = _difference(own[name], tensor)
        if difference > _MAX_EQUAL_DIFFERENCE:
            differences.append(f"{name}: relative difference {difference:.2g}")
    return tuple(differences)


def worst_tokens(
    agreement: Agreement, segments: torch.Tensor, tokenizer: Any, *, bos: bool
) -> tuple[TokenLoss, ...]:
    """Return the tokens with the largest loss. segments: int64 [segments, context], as evaluated.

    bos: each segment begins with a token that is not part of the text.
    """
    losses = agreement.token_loss
    width = losses.shape[1]
    length, first = (width, 0) if bos else (width + 1, 1)  # of a segment in the text
    order = np.argsort(-np.nan_to_num(losses, nan=np.inf), axis=None, kind="stable")
    worst = []
    for flat in order[:_WORST_TOKENS].tolist():
        segment, place = divmod(flat, width)
        row = segments[segment].tolist()
        before = row[max(0, place + 1 - _MAX_SHOWN_TOKENS) : place + 1]
        worst.append(
            TokenLoss(
                segment * length + first + place,
                tokenizer.decode([row[place + 1]]),
                tokenizer.decode(before),
                float(losses[segment, place]),
                float(agreement.token_kl[segment, place]),
            )
        )
    return tuple(worst)


def is_foldable(original: Any, model: Any, folds: Folds) -> bool:
    """Return True if layers can be compared one by one, because all folds are known.

    This is so if the model is not quantized, if its folds are known, or if its norm weights are the
    original's within 1 %.
    """
    quantized = any(isinstance(m, FakeQuantizedLinear) for m in model.modules())
    if not quantized or folds.inputs or folds.outputs:
        return True
    norms = [
        name
        for name, parameter in original.named_parameters()
        if parameter.ndim == 1 and name.endswith("weight")
    ]
    own: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    return all(_difference(own[name], dict(original.named_parameters())[name]) <= 1e-2
               for name in norms if name in own)  # fmt: skip


class _Unfolded(nn.Module):
    """The original's layer, with inputs and outputs converted between folded layers."""

    def __init__(self, layer: nn.Module, folds: Folds, name: str) -> None:
        super().__init__()
        self.weight = layer.weight
        self._layer = [layer]  # in a list, so that it is not registered as a submodule
        self._folds, self._name = folds, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._layer[0](self._folds.unfold_input(self._name, x))
        return self._folds.fold_output(self._name, y)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(element) for name, element in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape:
        return math.inf
    before, after = theirs.detach().double(), ours.detach().double().to(theirs.device)
    size, wrong = float(before.square().sum()), float((after - before).square().sum())
    return math.sqrt(wrong / size) if size else (math.inf if wrong else 0.0)


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _kl_restored(loss: LayerLoss) -> float:
    value = loss.kl_restored
    return math.inf if value is None or math.isnan(value) else value


def named_layers(layers: Sequence[LayerLoss], kl: float | None, count: int = 3) -> str:
    """Format the most important layers: `model.layers.1.mlp.down_proj (KL 0.9 → 0.001)`.

    Empty if none differs from the original's.
    """
    layers = [loss for loss in layers if not loss.error <= _MAX_EQUAL_DIFFERENCE]
    parts = [
        f"{loss.layer} (KL {kl:.2g} → {loss.kl_restored:.2g} with the original's)"
        if kl is not None and loss.kl_restored is not None
        else f"{loss.layer} (output error {loss.error:.2g})"
        for loss in layers[:count]
    ]
    return ", ".join(parts)
