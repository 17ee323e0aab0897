"""Conversion of layers that transformers packs differently: GPT-2's Conv1D, experts in one tensor.

A scheme replaces linear layers one by one. Here a Conv1D, weights [K, N], becomes a linear layer,
and the experts of a mixture, [experts, N, K] in one parameter, become three linear layers each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_CONV_1D = "Conv1D"  # class of transformers, used by GPT-2
_PACKED = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Origin:
    """Location, in the original transformers model, of the weight of a converted layer.

    name: of its parameter. index: of the expert in it; None: the parameter is one layer's weight,
    transposed. start, rows: first row and number of rows within the expert.
    """

    name: str
    index: int | None = None
    start: int = 0
    rows: int = 0


class Experts(nn.ModuleList):
    """Experts of one block as separate linear layers, equivalent to transformers' packed class.

    Child `3.down_proj` is the linear layer of expert 3. An expert is computed on the tokens that
    the router sends to it, and not at all if there are none.
    """

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Apply the chosen experts to hidden [T, K].

        top_k_index, top_k_weights: [T, chosen], experts of each token and their shares.
        """
        output = torch.zeros_like(hidden)
        for index in torch.unique(top_k_index).tolist():
            if index >= len(self):  # transformers' marker of experts in other processes
                continue
            tokens, places = torch.where(top_k_index == index)
            expert_output = self[index](hidden[tokens]) * top_k_weights[tokens, places, None]
            output.index_add_(0, tokens, expert_output.to(output.dtype))
        return output


class _Expert(nn.Module):
    """A gated feed-forward; its weights are views of the packed ones."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Any) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.gate_proj, self.up_proj = _linear(gate), _linear(up)
        self.down_proj = _linear(down)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return y


def with_linear_layers(model: nn.Module) -> nn.Module:
    """Replace each Conv1D, and each layer of each packed expert, by a linear layer.

    Experts with biases, transposed or without a gate are not converted; no layer map has them.
    """
    linear_origins(model)
    return model


def linear_origins(model: nn.Module) -> dict[str, Origin]:
    """Convert like with_linear_layers; returns the origins of the weights by their new names."""
    origins: dict[str, Origin] = {}
    for name, module in list(model.named_modules()):
        if is_convolution(module):
            replace_module(model, name, _of_conv(module))
            origins[f"{name}.weight"] = Origin(f"{name}.weight")
        elif _is_packed(module):
            experts = _of_packed(module)
            replace_module(model, name, experts)
            origins |= _origins(name, experts)
    return origins


def experts_in(block: nn.Module) -> int:
    """Number of experts of a block after with_linear_layers; 0: its feed-forward is dense."""
    return next((len(part) for part in block.modules() if isinstance(part, Experts)), 0)


def is_convolution(module: nn.Module) -> bool:
    """Return True for a Conv1D of transformers."""
    return type(module).__name__ == _CONV_1D


def _is_packed(module: nn.Module) -> bool:
    packed: list[Any] = [getattr(module, name, None) for name in _PACKED]
    plain = not any(
        getattr(module, name, False)
        for name in ("has_bias", "is_transposed", "has_post_expert_norm")
    )
    is_gated = all(getattr(module, name, True) for name in ("has_gate", "is_concatenated"))
    has_three_dimensions = all(isinstance(p, nn.Parameter) and p.ndim == 3 for p in packed)
    return has_three_dimensions and plain and is_gated and hasattr(module, "act_fn")


def _of_conv(module: nn.Module) -> nn.Linear:
    weight, bias = module.weight, module.bias
    assert isinstance(weight, torch.Tensor)
    assert isinstance(bias, torch.Tensor)
    linear = _linear(weight.detach().T.contiguous())
    linear.bias = nn.Parameter(bias.detach())
    return linear


def _of_packed(module: nn.Module) -> Experts:
    gate_up, down = (getattr(module, name).detach() for name in _PACKED)
    pairs = zip(gate_up, down, strict=True)
    return Experts(_Expert(first, second, module.act_fn) for first, second in pairs)


def _origins(name: str, experts: Experts) -> dict[str, Origin]:
    gate_up, down = (f"{name}.{packed}" for packed in _PACKED)
    origins = {}
    for index, expert in enumerate(experts):
        assert isinstance(expert, _Expert)
        inner, hidden = expert.down_proj.in_features, expert.down_proj.out_features
        for layer, origin in (
            ("gate_proj", Origin(gate_up, index, 0, inner)),
            ("up_proj", Origin(gate_up, index, inner, inner)),
            ("down_proj", Origin(down, index, 0, hidden)),
        ):
            origins[f"{name}.{index}.{layer}.weight"] = origin
    return origins


def _linear(weight: torch.Tensor) -> nn.Linear:
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight)
    return linear


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module called `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
