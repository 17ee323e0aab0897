"""Map of a Hugging Face decoder: its linear layers, and the modules that produce their inputs.

Schemes work on blocks, sites and their inputs, and never on names of an architecture. Embeddings
and the output head are not among the sites: no scheme quantizes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from flexq_bench.schemes.architectures import (
    ARCHITECTURES,
    Architecture,
    SiteInput,
    architecture_of,
)
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.linear_layers import experts_in, is_convolution
from flexq_bench.workloads.names import unknown

_EXPERT = re.compile(r"experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class LinearSite:
    """A linear layer of a block: weights [n, k]. name: within the model, `model.layers.0.….q_proj`.

    kind: see Architecture; the same for this layer in all blocks; for example `experts.3.down_proj`
    for a layer of an expert.
    """

    name: str
    block: int
    kind: str
    n: int
    k: int

    @property
    def role(self) -> str:
        """Kind without the number of an expert, which determines the formats: `down_proj`."""
        return _EXPERT.sub("", self.kind)

    @property
    def of_expert(self) -> bool:
        return self.role != self.kind


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A block's sites in the order of the forward pass, and their inputs."""

    sites: tuple[LinearSite, ...]
    site_inputs: tuple[SiteInput, ...]


@dataclass(frozen=True, slots=True)
class ModelMap:
    """The maps of a model's blocks. Blocks of a mixture of experts may differ."""

    architecture: str
    names: Architecture
    block_maps: tuple[BlockMap, ...]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_maps)

    @property
    def sites(self) -> tuple[LinearSite, ...]:
        """Return all sites, in the order of the forward pass."""
        return tuple(site for block in self.block_maps for site in block.sites)

    @property
    def roles(self) -> tuple[str, ...]:
        """Return all roles of sites, in the order of the forward pass."""
        return tuple(dict.fromkeys(site.role for site in self.sites))

    def of_block(self, block: int) -> tuple[LinearSite, ...]:
        """Return the sites of a block."""
        return self.block_maps[block].sites

    def inputs_of(self, block: int) -> tuple[SiteInput, ...]:
        """Return the inputs of a block's sites; each site reads one of them."""
        return self.block_maps[block].site_inputs

    def scalable_inputs(self, block: int) -> tuple[SiteInput, ...]:
        """Return the inputs of a block whose source can be divided by scales."""
        return tuple(i for i in self.inputs_of(block) if i.through is not None)

    def block_module(self, model: nn.Module, block: int) -> nn.Module:
        return model.get_submodule(f"{self.names.blocks}.{block}")


def map_model(model: nn.Module) -> ModelMap:
    """Map a model that is not quantized yet.

    Raises QuantizeError if its architecture is unknown, if it is already quantized, or if its parts
    are not where the architecture has them.
    """
    architecture = type(model).__name__
    names = architecture_of(model)
    if names is None:
        raise QuantizeError(
            f"{unknown('layer map for the architecture', architecture, ARCHITECTURES)}: pick "
            "another model, or measure the shapes of its layers (sweep --config)"
        )
    config: Any = model.config
    blocks = range(int(config.num_hidden_layers))
    return ModelMap(architecture, names, tuple(_map_block(model, names, b) for b in blocks))


def stored_names(architecture: str) -> Callable[[str], str]:
    """Return a function from a weight's name in transformers to its name in files."""
    names = ARCHITECTURES.get(architecture)
    return partial(_replaced, () if names is None else names.stored)


def names_of_stored(architecture: str) -> Callable[[str], str]:
    """Return a function from a weight's name in files to its name in transformers."""
    names = ARCHITECTURES.get(architecture)
    stored = () if names is None else names.stored
    return partial(_replaced, [(there, here) for here, there in reversed(stored)])


def _replaced(pairs: Iterable[tuple[str, str]], name: str) -> str:
    for old, new in pairs:
        name = name.replace(old, new)
    return name


def _map_block(model: nn.Module, names: Architecture, block: int) -> BlockMap:
    if names.experts:
        names = _of_mixture(model, names, block)
    sites = tuple(_site(model, names, block, path) for path in names.linears)
    return BlockMap(sites, _site_inputs(model, names, block, sites))


def _of_mixture(model: nn.Module, names: Architecture, block: int) -> Architecture:
    """Return the architecture of a mixture's block: dense, or extended by its experts' layers."""
    module = model.get_submodule(f"{names.blocks}.{block}")
    count = experts_in(module)
    if count == 0:
        parts = dict(module.named_modules())
        if names.dense is None or not all(path in parts for path in names.dense.linears):
            raise QuantizeError(
                f"block {block} of this {type(model).__name__} has no experts, or stores them "
                "otherwise, which has no layer map"
            )
        return names.dense
    paths, inputs = [], []
    for index in range(count):
        expert = f"{names.experts}.{index}"
        kinds = [f"experts.{index}.{layer}" for layer in ("gate_proj", "up_proj", "down_proj")]
        paths += [f"{names.experts}.{kind.removeprefix('experts.')}" for kind in kinds]
        inputs += [
            SiteInput(expert, tuple(kinds[:2]), None),
            SiteInput(f"{expert}.up_proj", (kinds[2],), "linear"),
        ]
    return replace(
        names,
        linears=(*names.linears, *paths),
        site_inputs=(*names.site_inputs, *inputs),
    )


def _site(model: nn.Module, names: Architecture, block: int, path: str) -> LinearSite:
    name = f"{names.blocks}.{block}.{path}"
    try:
        linear = model.get_submodule(name)
    except AttributeError as error:
        raise QuantizeError(f"{type(model).__name__} has no {name} here: {error}") from error
    if is_convolution(linear):
        raise QuantizeError(f"{name} is a Conv1D: call with_linear_layers before")
    if not isinstance(linear, nn.Linear) or not linear.weight.dtype.is_floating_point:
        raise QuantizeError(
            f"{name} is a {type(linear).__name__}, not a linear layer of real weights: the model "
            "is quantized already; load the one that it was made from"
        )
    return LinearSite(name, block, names.kind_of(path), linear.out_features, linear.in_features)


def _site_inputs(
    model: nn.Module, names: Architecture, block: int, sites: Sequence[LinearSite]
) -> tuple[SiteInput, ...]:
    sizes = {site.kind: site for site in sites}
    site_inputs = []
    for site_input in names.site_inputs:
        through = site_input.through if _passes(model, names, block, site_input) else None
        shared_heads = 1
        if site_input.source.endswith(".v_proj"):
            shared_heads = sizes[site_input.kinds[0]].k // sizes["v_proj"].n
        site_inputs.append(replace(site_input, through=through, shared_heads=shared_heads))
    return tuple(site_inputs)


def _passes(model: nn.Module, names: Architecture, block: int, site_input: SiteInput) -> bool:
    """Return True if a scale can be folded here in this model, as in its architecture."""
    if site_input.through is None:
        return False
    source: Any = model.get_submodule(f"{names.blocks}.{block}.{site_input.source}")
    if getattr(source, "weight", None) is None:  # norms of OLMo, and of OPT in Galactica
        return False
    config: Any = model.config
    if site_input.source.endswith(".v_proj"):
        return getattr(config, "clip_qkv", None) is None  # OLMo may clip values
    return site_input.source != "fc1" or config.activation_function == "relu"


def linear_at(model: nn.Module, name: str) -> nn.Linear:
    """Return the dense layer of this name. Raises QuantizeError if it has been replaced."""
    layer = model.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        raise QuantizeError(f"{name} is quantized already: load the model anew")
    return layer


def weight_of(model: nn.Module, site: LinearSite) -> torch.Tensor:
    """Return the dense weights of a site [n, k], detached."""
    return linear_at(model, site.name).weight.detach()
