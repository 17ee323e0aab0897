"""Map of a Hugging Face decoder: its linear layers, and the modules that produce their inputs.

Schemes work on blocks, sites and their inputs, and never on names of an architecture: blocks and
layers are those of transformers' own modules, and `channels` traces who reads what. Embeddings,
the output head, encoders of images and sound, and routers are not among the sites: no scheme
quantizes them. Neither are matrices with a side of less than 16, the tile of a tensor core, which
mix a few streams or gate a few heads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flexq_bench.schemes.channels import SiteInput, TracedInput, trace_inputs
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.linear_layers import Experts, ParallelLinears, is_convolution

_EXPERT = re.compile(r"experts\.\d+\.|\.\d+$")
_EXPERT_PATH = re.compile(r".*?experts\.\d+\.")
_NO_TEXT = re.compile(r"Vision|Visual|Audio|Image|Speech")
_ROUTERS = frozenset({"gate", "router", "router_gate", "shared_expert_gate"})
MIN_SIDE = 16
_MAX_UNREAD_SHARE = 0.1  # of the weights in blocks
_GATED_KIND = "down_proj"


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
    """The maps of a model's blocks, which may differ.

    path: name of the list of blocks. gated: down_proj reads the product of a gate (GLU).
    """

    architecture: str
    path: str
    block_maps: tuple[BlockMap, ...]
    gated: bool

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
        return model.get_submodule(f"{self.path}.{block}")


def map_model(model: nn.Module) -> ModelMap:
    """Map a model that is not quantized yet.

    Raises QuantizeError if it has no list of blocks with linear layers, if a tenth of the weights
    of its blocks is in tensors of unknown layout or belongs to several blocks, or if it is already
    quantized.
    """
    name = type(model).__name__
    path, blocks = _block_list(model)
    prefixes = [f"{path}.{index}" for index in range(len(blocks))]
    layers = [_layers(model, prefix) for prefix in prefixes]
    if not any(layers):
        raise QuantizeError(f"{name} has no linear layers in its blocks: pick another model")
    _check_shared(model, path)
    _check_unread(model, path, layers)
    first = {layer: _of_first_expert(model, layer) for own in layers for layer in own}
    inputs, order = trace_inputs(model, prefixes, dict.fromkeys(first.values()))
    maps = []
    for index, (prefix, own) in enumerate(zip(prefixes, layers, strict=True)):
        traced = [i for i in inputs if i.readers[0].startswith(f"{prefix}.")]
        alike = {name: first[name] for name in own}
        maps.append(_map_block(model, f"{prefix}.", index, alike, traced, order))
    gated = any(
        name.endswith(_GATED_KIND) and traced.is_product
        for traced in inputs
        for name in traced.readers
    )
    return ModelMap(name, path, tuple(maps), gated)


def _map_block(
    model: nn.Module,
    prefix: str,
    block: int,
    layers: Mapping[str, str],
    inputs: Sequence[TracedInput],
    order: Sequence[str],
) -> BlockMap:
    """Map a block. layers: names of its layers, and the traced ones that they are like."""
    kinds = _kinds([name.removeprefix(prefix) for name in layers])
    alike: dict[str, list[str]] = {}
    for name, first in layers.items():
        alike.setdefault(first, []).append(name)
    inputs_of: dict[str, SiteInput] = {}  # by the first reader
    for traced in inputs:
        for group in zip(*(alike[reader] for reader in traced.readers), strict=True):
            source = traced.source
            if group != traced.readers:  # of a later expert
                source = source.replace(_expert_of(traced.readers[0]), _expert_of(group[0]), 1)
            inputs_of[group[0]] = SiteInput(
                source.removeprefix(prefix) if source != prefix[:-1] else "",
                tuple(kinds[name.removeprefix(prefix)] for name in group),
                traced.through,
                traced.shared_heads,
                traced.head_dim,
                traced.norm_offset,
            )
    # All layers of an expert before those of the next, where the first expert ran.
    place = {_expert_of(name): at for at, name in reversed(list(enumerate(order)))}
    names = sorted(
        layers, key=lambda n: (place[_expert_of(layers[n])], _expert_of(n) != n and _index_of(n))
    )
    sites = []
    for name in names:
        linear = linear_at(model, name)
        kind = kinds[name.removeprefix(prefix)]
        sites.append(LinearSite(name, block, kind, linear.out_features, linear.in_features))
    return BlockMap(tuple(sites), tuple(inputs_of[n] for n in names if n in inputs_of))


def _kinds(paths: Sequence[str]) -> dict[str, str]:
    """The kind of each path within a block: its last part, and as many before as tell it apart.

    Layers of experts are `experts.3.down_proj`; others are compared among themselves only.
    """
    kinds = {}
    experts = [path for path in paths if _EXPERT.search(path)]
    for path in paths:
        if path in experts:
            kinds[path] = re.sub(r".*?(experts\.\d+\.)", r"\1", path)
            continue
        parts = path.split(".")
        others = [other.split(".") for other in paths if other not in (path, *experts)]
        count = 1
        while count < len(parts) and any(o[-count:] == parts[-count:] for o in others):
            count += 1
        kinds[path] = ".".join(parts[-count:])
    return kinds


def text_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by path, except those of encoders of images and sound."""
    towers: list[str] = []
    for path, module in model.named_modules():
        if path and _encodes_no_text(module, model):
            towers.append(f"{path}.")
        if not any(f"{path}.".startswith(tower) for tower in towers):
            yield path, module


def _encodes_no_text(module: Any, model: Any) -> bool:
    """True of a model within a model for images or sound, by its configuration or inputs."""
    if not hasattr(module, "main_input_name") or not hasattr(module, "config"):
        return False
    own, whole = type(module.config), type(model.config)
    inputs = {getattr(part, "main_input_name", None) for part in module.modules()} - {None}
    is_named = own is not whole and _NO_TEXT.search(own.__name__) is not None
    words = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    has_words = any(
        isinstance(part, nn.Embedding) and part.num_embeddings == words for part in module.modules()
    )
    return is_named or not (has_words or inputs & {"input_ids", "inputs_embeds"})


def mixtures(model: nn.Module) -> frozenset[str]:
    """The paths of modules with routed experts."""
    paths = set()
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if name in ("experts", "expert") or type(module).__name__.endswith("ParallelExperts"):
            paths.add(parent)
    return frozenset(paths)


def is_router(path: str, mixed: frozenset[str]) -> bool:
    """True of a module that chooses experts of these `mixtures`: `gate`, or one in `router`."""
    parts = path.split(".")
    return any(
        part in _ROUTERS and ".".join(parts[:index]) in mixed for index, part in enumerate(parts)
    )


def _block_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of modules with the most weights, and its name."""
    lists: dict[str, nn.ModuleList] = {}
    for path, module in text_modules(model):
        is_inside = any(path.startswith(f"{other}.") for other in lists)
        if type(module) is nn.ModuleList and len(module) and not is_inside:
            lists[path] = module
    if not lists:
        raise QuantizeError(f"{type(model).__name__} has no list of blocks: pick another model")
    path = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    return path, lists[path]


def _layers(model: nn.Module, prefix: str) -> list[str]:
    """Names of the sites of a block, in the order of its modules."""
    mixed = mixtures(model)
    names = []
    for path, module in model.get_submodule(prefix).named_modules(prefix=prefix):
        if is_convolution(module):
            raise QuantizeError(f"{path} is a Conv1D: call with_linear_layers before")
        if not isinstance(module, nn.Linear):
            if hasattr(module, "in_features") and hasattr(module, "layer"):
                raise QuantizeError(
                    f"{path} is a {type(module).__name__}, not a linear layer of real weights: the "
                    "model is quantized already; load the one that it was made from"
                )
            continue
        if not module.weight.dtype.is_floating_point:
            raise QuantizeError(
                f"{path} has weights of {module.weight.dtype}: the model is quantized already; "
                "load the one that it was made from"
            )
        is_small = min(module.weight.shape) < MIN_SIDE
        if not is_small and module.weight.ndim == 2 and not is_router(path, mixed):
            names.append(path)
    return names


def _check_shared(model: nn.Module, path: str) -> None:
    # Weights that transformers ties are separate ones while a model has none in memory.
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    owners: dict[int, str] = {}
    for name, parameter in parameters.items():
        if name.startswith(f"{path}.") and parameter.ndim > 1:
            block = name.removeprefix(f"{path}.").partition(".")[0]
            shared = id(parameters.get(tied.get(name, name), parameter))
            if owners.setdefault(shared, block) != block:
                raise QuantizeError(
                    f"blocks {owners[shared]} and {block} of {type(model).__name__} share "
                    f"weights ({name:.60}), and blocks are quantized one by one: pick another model"
                )


def _check_unread(model: nn.Module, path: str, layers: Sequence[Sequence[str]]) -> None:
    """Raise QuantizeError if too many weights of the blocks are in no module of a known kind."""
    known = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
    mixed, read = (
        mixtures(model),
        sum(linear_at(model, name).weight.numel() for own in layers for name in own),
    )
    unread: Counter[str] = Counter()
    for name, module in model.get_submodule(path).named_modules(prefix=path):
        if isinstance(module, known) or is_router(name, mixed):
            continue
        for part, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1:
                unread[f"{type(module).__name__}.{part}"] += parameter.numel()
    total = read + sum(unread.values())
    if sum(unread.values()) > _MAX_UNREAD_SHARE * total:
        raise QuantizeError(
            f"{type(model).__name__}: {sum(unread.values()) / total:.0%} of the weights of its "
            f"blocks have an unknown layout ({unread.most_common(1)[0][0]:.60}): pick another model"
        )


def _of_first_expert(model: nn.Module, name: str) -> str:
    """The layer's name in the first of experts that are packed in transformers, all alike."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        parent = ".".join(parts[:index])
        if part.isdigit() and isinstance(model.get_submodule(parent), Experts | ParallelLinears):
            return ".".join([parent, "0", *parts[index + 1 :]])
    return name


def _expert_of(name: str) -> str:
    """The path of the expert of a layer, with the point after it."""
    match = _EXPERT_PATH.match(name)
    return match[0] if match else name


def _index_of(name: str) -> int:
    """The number of the expert of a layer."""
    return int(_expert_of(name).split(".")[-2])


def linear_at(model: nn.Module, name: str) -> nn.Linear:
    """Return the dense layer of this name. Raises QuantizeError if it has been replaced."""
    layer = model.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        raise QuantizeError(f"{name} is quantized already: load the model anew")
    return layer


def weight_of(model: nn.Module, site: LinearSite) -> torch.Tensor:
    """Return the dense weights of a site [n, k], detached."""
    return linear_at(model, site.name).weight.detach()
