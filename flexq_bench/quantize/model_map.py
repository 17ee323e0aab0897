"""Where the linear layers of a Hugging Face decoder are, and what feeds each of them.

A scheme sees blocks, sites and feeds and no names of one architecture. Embeddings and the output
head are not among the sites: no scheme quantizes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from flexq_bench.quantize.errors import QuantizeError
from workloads.names import unknown


@dataclass(frozen=True, slots=True)
class Feed:
    """A module of a block whose output channels are the input channels of some sites.

    A scale on those channels may be divided out of `source` and multiplied into `kinds`
    (SmoothQuant, AWQ, OmniQuant, ABQ-LLM, DGQ).

    source: its name within the block. kinds: the sites that read it.
    through: "norm", its weight is one factor a channel; "linear", rows of its weight are channels.
    shared_heads: kinds read every channel of `source` several times, once per query head of a
    key-value head (v_proj -> o_proj with grouped-query attention); 1: once.
    """

    source: str
    kinds: tuple[str, ...]
    through: Literal["norm", "linear"]
    shared_heads: int = 1


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one class of transformers names its parts.

    linears: path of each site within a block, in the order of the forward pass; the last part is
    its kind. gated: the feed-forward has a gate (GLU). norm_offset: what a norm adds to its weight.
    """

    blocks: str
    linears: tuple[str, ...]
    feeds: tuple[Feed, ...]
    gated: bool
    norm_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class LinearSite:
    """A linear layer of a block: weights [n, k]. name: within the model, `model.layers.0.….q_proj`.

    kind: the last part of the name; equal for the same layer of all blocks.
    """

    name: str
    block: int
    kind: str
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class ModelMap:
    """A model's sites in the order of the forward pass."""

    architecture: str
    names: Architecture
    sites: tuple[LinearSite, ...]
    blocks: int
    feeds: tuple[Feed, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every kind of site, in the order of the forward pass."""
        return tuple(dict.fromkeys(site.kind for site in self.sites))

    def of_block(self, block: int) -> tuple[LinearSite, ...]:
        return tuple(site for site in self.sites if site.block == block)

    def block_module(self, model: nn.Module, block: int) -> nn.Module:
        return model.get_submodule(f"{self.names.blocks}.{block}")


_LLAMA = Architecture(
    blocks="model.layers",
    linears=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ),
    feeds=(
        Feed("input_layernorm", ("q_proj", "k_proj", "v_proj"), "norm"),
        Feed("self_attn.v_proj", ("o_proj",), "linear"),
        Feed("post_attention_layernorm", ("gate_proj", "up_proj"), "norm"),
        Feed("mlp.up_proj", ("down_proj",), "linear"),
    ),
    gated=True,
)
_GEMMA = Architecture(_LLAMA.blocks, _LLAMA.linears, _LLAMA.feeds, gated=True, norm_offset=1.0)
# Norms after attention and before the feed-forward are different modules here.
_GEMMA_2 = Architecture(
    _LLAMA.blocks,
    _LLAMA.linears,
    (
        *_LLAMA.feeds[:2],
        Feed("pre_feedforward_layernorm", ("gate_proj", "up_proj"), "norm"),
        _LLAMA.feeds[3],
    ),
    gated=True,
    norm_offset=1.0,
)
_OPT = Architecture(
    blocks="model.decoder.layers",
    linears=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "fc1",
        "fc2",
    ),
    feeds=(
        Feed("self_attn_layer_norm", ("q_proj", "k_proj", "v_proj"), "norm"),
        Feed("self_attn.v_proj", ("out_proj",), "linear"),
        Feed("final_layer_norm", ("fc1",), "norm"),
        Feed("fc1", ("fc2",), "linear"),  # ReLU passes positive scales through
    ),
    gated=False,
)

ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "SmolLM3ForCausalLM": _LLAMA,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_2,
    "OPTForCausalLM": _OPT,
}


def map_model(model: nn.Module) -> ModelMap:
    """The map of a model that is not quantized yet.

    Raises QuantizeError if its architecture has none, if it is quantized already, or if its parts
    are not where the architecture has them.
    """
    architecture = type(model).__name__
    names = ARCHITECTURES.get(architecture)
    if names is None:
        raise QuantizeError(unknown("layer map for the architecture", architecture, ARCHITECTURES))
    config: Any = model.config
    if architecture == "OPTForCausalLM" and not config.do_layer_norm_before:
        raise QuantizeError(
            "OPT with its norms after the layers (opt-350m) has no layer map: take another size"
        )
    blocks = int(config.num_hidden_layers)
    sites = tuple(
        _site(model, names, block, path) for block in range(blocks) for path in names.linears
    )
    return ModelMap(architecture, names, sites, blocks, _feeds(names, config))


def _site(model: nn.Module, names: Architecture, block: int, path: str) -> LinearSite:
    name = f"{names.blocks}.{block}.{path}"
    try:
        linear = model.get_submodule(name)
    except AttributeError as error:
        raise QuantizeError(f"{type(model).__name__} has no {name} here: {error}") from error
    if not isinstance(linear, nn.Linear) or not linear.weight.dtype.is_floating_point:
        raise QuantizeError(
            f"{name} is a {type(linear).__name__}, not a linear layer of real weights: the model "
            "is quantized already; load the one that it was made from"
        )
    return LinearSite(name, block, path.rsplit(".", 1)[-1], linear.out_features, linear.in_features)


def _feeds(names: Architecture, config: Any) -> tuple[Feed, ...]:
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return tuple(
        Feed(feed.source, feed.kinds, feed.through, heads // kv_heads)
        if feed.source.endswith("v_proj")
        else feed
        for feed in names.feeds
    )


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module where `name` is."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def linear_at(model: nn.Module, name: str) -> nn.Linear:
    """The dense layer of this name. Raises QuantizeError if it has been replaced."""
    found = model.get_submodule(name)
    if not isinstance(found, nn.Linear):
        raise QuantizeError(f"{name} is quantized already: load the model anew")
    return found


def weight_of(model: nn.Module, site: LinearSite) -> torch.Tensor:
    """The dense weights of a site [n, k], detached."""
    return linear_at(model, site.name).weight.detach()
