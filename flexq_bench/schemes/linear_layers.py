"""Conversion of layers that transformers packs differently: GPT-2's Conv1D, experts in one tensor.

A scheme replaces linear layers one by one. Here a Conv1D, weights [K, N], becomes a linear layer,
and the experts of a mixture, [experts, N, K] or [experts, K, N] in one parameter, become linear
layers each. The experts' class says how they are packed, by the attributes that transformers'
`use_experts_implementation` gives it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

_CONV_1D = "Conv1D"  # class of transformers, used by GPT-2
_PACKED = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"), ("weight",))


@dataclass(frozen=True, slots=True)
class Origin:
    """Location, in the original transformers model, of the weight or bias of a converted layer.

    name: of its parameter. index: of the expert in it; None: the parameter belongs to one layer.
    transposed: it has [K, N]. rows: the slice of rows that are the layer's, of the expert's [N, K].
    shape: of the whole parameter.
    """

    name: str
    index: int | None = None
    transposed: bool = False
    rows: tuple[int | None, ...] = (None,)
    shape: tuple[int, ...] = ()

    def take(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the layer's weight [N, K] or bias [N], a view."""
        own = parameter if self.index is None else parameter[self.index]
        return (own.T if self.transposed else own)[slice(*self.rows)]


class Experts(nn.ModuleList):
    """Experts of one block as separate linear layers, equivalent to transformers' packed class.

    Child `3.down_proj` is the linear layer of expert 3. An expert is computed on the tokens that
    the router sends to it, and not at all if there are none. identities: experts after these that
    return their input (LongCat).
    """

    def __init__(self, experts: Iterable[nn.Module], identities: int = 0) -> None:
        super().__init__(experts)
        self._identities = identities

    def forward(
        self,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the chosen experts to hidden [T, K].

        top_k_index, top_k_weights: [T, chosen], experts of each token and their shares; None: each
        expert has its own T / experts rows, in their order.
        """
        if hidden.device.type == "meta":  # traced: all experts are alike
            traced: torch.Tensor = self[0](hidden + 0)
            return traced
        if top_k_index is None or top_k_weights is None:
            parts = zip(self, hidden.chunk(len(self)), strict=True)
            return torch.cat([expert(part) for expert, part in parts])
        output = torch.zeros_like(hidden)
        for index in torch.unique(top_k_index).tolist():
            if index >= len(self) + self._identities:  # transformers' marker of other processes
                continue
            tokens, places = torch.where(top_k_index == index)
            own = hidden[tokens] if index >= len(self) else self[index](hidden[tokens])
            expert_output = own * top_k_weights[tokens, places, None]
            output.index_add_(0, tokens, expert_output.to(output.dtype))
        return output


class ParallelLinears(nn.ModuleList):
    """One linear layer of every expert; each maps its own rows (JetMoE)."""

    def forward(self, hidden: torch.Tensor, counts: Any) -> torch.Tensor:
        """Map hidden [T, K], whose first counts[0] rows belong to the first expert, and so on."""
        if hidden.device.type == "meta":
            traced: torch.Tensor = self[0](hidden + 0)
            return traced
        parts = torch.split(hidden, [int(count) for count in counts])
        return torch.cat([layer(part) for layer, part in zip(self, parts, strict=True)])


class _Expert(nn.Module):
    """A feed-forward; its weights are views of the packed ones.

    combine: of the gate's and the other's output; without a gate, of one output.
    """

    def __init__(
        self, layers: Mapping[str, nn.Linear], combine: Callable[..., torch.Tensor]
    ) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._combine = combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [layer(x) for name, layer in self.named_children() if name != "down_proj"]
        y: torch.Tensor = self.get_submodule("down_proj")(self._combine(*parts))
        return y


def with_linear_layers(model: nn.Module) -> nn.Module:
    """Replace each Conv1D, and each layer of each packed expert, by a linear layer.

    Experts that are packed otherwise are not converted, and no scheme quantizes them.
    """
    linear_origins(model)
    return model


def linear_origins(model: nn.Module) -> dict[str, Origin]:
    """Convert like with_linear_layers; returns the origins of the weights by their new names."""
    origins: dict[str, Origin] = {}
    for name, module in list(model.named_modules()):
        if is_convolution(module):
            own = Origin("weight", transposed=True), Origin("bias")
            replace_module(model, name, _linear(module, *own))
            origins |= _named(name, module, {"": own})
        elif (packed := _packing(module)) is not None:
            layers = {
                f"{index}.{layer}".rstrip("."): places
                for index in range(packed[0])
                for layer, places in _layers(module, packed[1], index).items()
            }
            replace_module(model, name, _separated(module, packed[1], layers))
            origins |= _named(name, module, layers)
    return origins


def experts_in(block: nn.Module) -> int:
    """Number of experts of a block after with_linear_layers; 0: its feed-forward is dense."""
    return next((len(part) for part in block.modules() if isinstance(part, Experts)), 0)


def is_convolution(module: nn.Module) -> bool:
    """Return True for a Conv1D of transformers."""
    return type(module).__name__ == _CONV_1D


_Places = tuple[Origin, Origin | None]  # of a layer's weight and bias


def _packing(module: nn.Module) -> tuple[int, tuple[str, ...]] | None:
    """The number of packed experts and the names of their parameters; None: no known packing."""
    own = {name: p for name, p in module.named_parameters(recurse=False) if p.ndim == 3}
    for names in _PACKED:
        if own.keys() != set(names) or getattr(module, "has_post_expert_norm", False):
            continue
        is_parallel = names == ("weight",)
        if is_parallel != type(module).__name__.endswith("ParallelExperts"):
            continue
        if is_parallel or hasattr(module, "act_fn") or hasattr(module, "_apply_gate"):
            return len(own[names[-1]]), names
    return None


def _layers(module: Any, names: tuple[str, ...], index: int) -> dict[str, _Places]:
    """Origins of the layers of one expert, within the module."""
    if names == ("weight",):
        return {"": (Origin("weight", index), None)}
    first, down = (getattr(module, name) for name in names)
    is_gated = names[0] == "gate_up_proj"
    transposed = getattr(module, "is_transposed", None)
    if transposed is None:  # Llama 4: both have the hidden size there
        transposed = is_gated and first.shape[1] == down.shape[2]
    inner = down.shape[1 if transposed else 2]
    rows: dict[str, tuple[int | None, ...]] = {names[0]: (None,)}
    if is_gated:
        both: tuple[tuple[int | None, ...], ...] = ((inner,), (inner, None))
        if not getattr(module, "is_concatenated", True):
            both = ((0, None, 2), (1, None, 2))
        rows = dict(zip(("gate_proj", "up_proj"), both, strict=True))
    layers: dict[str, _Places] = {}
    for layer, (name, part) in {
        **{layer: (names[0], part) for layer, part in rows.items()},
        "down_proj": (names[1], (None,)),
    }.items():
        bias = f"{name}_bias"
        has_bias = isinstance(getattr(module, bias, None), nn.Parameter)
        layers[layer] = (
            Origin(name, index, transposed, part),
            Origin(bias, index, rows=part) if has_bias else None,
        )
    return layers


def _separated(module: Any, names: tuple[str, ...], layers: Mapping[str, _Places]) -> nn.ModuleList:
    """The module's layers as modules. layers: by `INDEX.NAME`."""
    linears = {name: _linear(module, *places) for name, places in layers.items()}
    if names == ("weight",):
        return ParallelLinears(linears.values())
    combine = _combination(module)
    experts: dict[str, dict[str, nn.Linear]] = {}
    for name, linear in linears.items():
        index, _, layer = name.partition(".")
        experts.setdefault(index, {})[layer] = linear
    identities = getattr(module, "zero_expert_num", 0)
    return Experts((_Expert(own, combine) for own in experts.values()), identities)


def _combination(module: Any) -> Callable[..., torch.Tensor]:
    """The function between an expert's layers, as its class has it."""
    shell = copy.copy(module)
    shell._parameters = {}  # the function must not keep the packed weights
    apply_gate = getattr(shell, "_apply_gate", None)

    def combine(first: torch.Tensor, *up: torch.Tensor) -> torch.Tensor:
        if not up:
            return shell.act_fn(first)  # type: ignore[no-any-return]
        if apply_gate is None:
            return shell.act_fn(first) * up[0]  # type: ignore[no-any-return]
        if getattr(shell, "is_concatenated", True):
            return apply_gate(torch.cat([first, *up], dim=-1))  # type: ignore[no-any-return]
        return apply_gate(torch.stack([first, *up], dim=-1).flatten(-2))  # type: ignore[no-any-return]

    return combine


def _named(name: str, module: Any, layers: Mapping[str, _Places]) -> dict[str, Origin]:
    """Origins by the names of weights and biases within the model."""
    return {
        f"{path}.{part}": replace(
            origin, name=f"{name}.{origin.name}", shape=tuple(getattr(module, origin.name).shape)
        )
        for layer, places in layers.items()
        for path in [f"{name}.{layer}".rstrip(".")]
        for part, origin in zip(("weight", "bias"), places, strict=True)
        if origin is not None
    }


def _linear(module: Any, weight: Origin, bias: Origin | None) -> nn.Linear:
    values = weight.take(getattr(module, weight.name).detach())
    n, k = values.shape
    linear = nn.Linear(k, n, bias=False, device="meta", dtype=values.dtype)
    linear.weight = nn.Parameter(values.contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.take(getattr(module, bias.name).detach()).contiguous())
    return linear


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module called `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
