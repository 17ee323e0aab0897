"""Map of a Hugging Face decoder: its linear layers, and the modules that produce their inputs.

Schemes work on blocks, sites and their inputs, and never on names of an architecture. Embeddings
and the output head are not among the sites: no scheme quantizes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.linear_layers import experts_in, is_convolution
from workloads.names import unknown

_EXPERT = re.compile(r"experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class SiteInput:
    """The input of one or more sites: output channels of a module of the block ("": its own input).

    A scale on these channels may be divided out of `source` and multiplied into `kinds`
    (SmoothQuant, AWQ, OmniQuant, ABQ-LLM, DGQ).

    source: its name within the block. kinds: the sites that read it. through: "norm": its weight is
    one factor per channel; "linear": rows of its weight are channels; None: a scale can't be folded
    (an activation function in between, a norm without weights), and the entry only states that the
    kinds have the same input. shared_heads: how many times the kinds read each channel of `source`,
    once per query head of a key-value head (v_proj -> o_proj with grouped-query attention); usually
    1.
    """

    source: str
    kinds: tuple[str, ...]
    through: Literal["norm", "linear"] | None
    shared_heads: int = 1


@dataclass(frozen=True, slots=True)
class Architecture:
    """Names of the parts of one model class of transformers.

    linears: path of each site within a block, in the order of the forward pass; its last part is
    the kind, including the part before if two sites would otherwise have the same kind. gated: the
    feed-forward has a gate (GLU). norm_offset: constant that a norm adds to its weight. attention:
    name of a block's attention. experts: path of a block's experts (linear_layers.Experts), whose
    layers come after `linears`; "": it has none. stored: pairs of a part of a weight's name here
    and its counterpart in files.
    """

    blocks: str
    linears: tuple[str, ...]
    site_inputs: tuple[SiteInput, ...]
    gated: bool
    norm_offset: float = 0.0
    attention: str = "self_attn"
    experts: str = ""
    stored: tuple[tuple[str, str], ...] = ()

    def kind_of(self, path: str) -> str:
        """Return the kind of the site at a path within a block."""
        last = path.rsplit(".", 1)[-1]
        if self.experts and path.startswith(f"{self.experts}."):
            return f"experts.{path.removeprefix(self.experts + '.')}"
        count = sum(linear.rsplit(".", 1)[-1] == last for linear in self.linears)
        return last if count == 1 else ".".join(path.rsplit(".", 2)[-2:])


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
class ModelMap:
    """A model's sites in the order of the forward pass."""

    architecture: str
    names: Architecture
    sites: tuple[LinearSite, ...]
    blocks: int
    site_inputs: tuple[SiteInput, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds of sites, in the order of the forward pass."""
        return tuple(dict.fromkeys(site.kind for site in self.sites))

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles of sites, in the order of the forward pass."""
        return tuple(dict.fromkeys(site.role for site in self.sites))

    @property
    def scalable_inputs(self) -> tuple[SiteInput, ...]:
        """Inputs whose source can be divided by scales."""
        return tuple(
            site_input for site_input in self.site_inputs if site_input.through is not None
        )

    def of_block(self, block: int) -> tuple[LinearSite, ...]:
        count = len(self.sites) // self.blocks  # each block has the same layers
        return self.sites[block * count : (block + 1) * count]

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
    site_inputs=(
        SiteInput("input_layernorm", ("q_proj", "k_proj", "v_proj"), "norm"),
        SiteInput("self_attn.v_proj", ("o_proj",), "linear"),
        SiteInput("post_attention_layernorm", ("gate_proj", "up_proj"), "norm"),
        SiteInput("mlp.up_proj", ("down_proj",), "linear"),
    ),
    gated=True,
)
_GEMMA = Architecture(
    _LLAMA.blocks, _LLAMA.linears, _LLAMA.site_inputs, gated=True, norm_offset=1.0
)
# Norms after attention and before the feed-forward are different modules here.
_GEMMA_2 = Architecture(
    _LLAMA.blocks,
    _LLAMA.linears,
    (
        *_LLAMA.site_inputs[:2],
        SiteInput("pre_feedforward_layernorm", ("gate_proj", "up_proj"), "norm"),
        _LLAMA.site_inputs[3],
    ),
    gated=True,
    norm_offset=1.0,
)
# Norms come after attention and the feed-forward, and their outputs are added to what both read.
_OLMO_2 = Architecture(
    _LLAMA.blocks,
    _LLAMA.linears,
    (
        replace(_LLAMA.site_inputs[0], source="", through=None),
        _LLAMA.site_inputs[1],
        replace(_LLAMA.site_inputs[2], through=None),
        _LLAMA.site_inputs[3],
    ),
    gated=True,
)
# Fused layers: only some of their rows are channels of the next one.
_PHI_3 = Architecture(
    _LLAMA.blocks,
    ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    (
        SiteInput("input_layernorm", ("qkv_proj",), "norm"),
        SiteInput("self_attn.qkv_proj", ("o_proj",), None),
        SiteInput("post_attention_layernorm", ("gate_up_proj",), "norm"),
        SiteInput("mlp.gate_up_proj", ("down_proj",), None),
    ),
    gated=True,
)
_STARCODER_2 = Architecture(
    _LLAMA.blocks,
    (*_LLAMA.linears[:4], "mlp.c_fc", "mlp.c_proj"),
    (
        *_LLAMA.site_inputs[:2],
        SiteInput("post_attention_layernorm", ("c_fc",), "norm"),
        SiteInput("mlp.c_fc", ("c_proj",), None),  # no scale through GELU
    ),
    gated=False,
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
    site_inputs=(
        SiteInput("self_attn_layer_norm", ("q_proj", "k_proj", "v_proj"), "norm"),
        SiteInput("self_attn.v_proj", ("out_proj",), "linear"),
        SiteInput("final_layer_norm", ("fc1",), "norm"),
        SiteInput("fc1", ("fc2",), "linear"),  # ReLU commutes with positive scales
    ),
    gated=False,
)
# OPT-350M: as in OLMo 2, norms come after attention and after the feed-forward.
_OPT_350M = replace(
    _OPT,
    site_inputs=(
        replace(_OPT.site_inputs[0], source="", through=None),
        _OPT.site_inputs[1],
        SiteInput("self_attn_layer_norm", ("fc1",), None),
        _OPT.site_inputs[3],
    ),
)
# GPT-2: its Conv1D layers, after conversion by `with_linear_layers`. GELU in between.
_GPT_2 = Architecture(
    blocks="transformer.h",
    linears=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    site_inputs=(
        SiteInput("ln_1", ("c_attn",), "norm"),
        SiteInput("attn.c_attn", ("attn.c_proj",), None),
        SiteInput("ln_2", ("c_fc",), "norm"),
        SiteInput("mlp.c_fc", ("mlp.c_proj",), None),
    ),
    gated=False,
    attention="attn",
)
# Also Pythia. Attention and feed-forward have the same input, each with a separate norm.
_GPT_NEOX = Architecture(
    blocks="gpt_neox.layers",
    linears=(
        "attention.query_key_value",
        "attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    site_inputs=(
        SiteInput("input_layernorm", ("query_key_value",), "norm"),
        SiteInput("attention.query_key_value", ("dense",), None),
        SiteInput("post_attention_layernorm", ("dense_h_to_4h",), "norm"),
        SiteInput("mlp.dense_h_to_4h", ("dense_4h_to_h",), None),
    ),
    gated=False,
    attention="attention",
    stored=(("lm_head.", "embed_out."),),
)
# Phi 1 to 2: attention and feed-forward read the output of one norm.
_PHI = Architecture(
    _LLAMA.blocks,
    (*_LLAMA.linears[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2"),
    (
        SiteInput("input_layernorm", ("q_proj", "k_proj", "v_proj", "fc1"), "norm"),
        SiteInput("self_attn.v_proj", ("dense",), "linear"),
        SiteInput("mlp.fc1", ("fc2",), None),
    ),
    gated=False,
)
# Falcon 7B: as Phi. 40B and 180B have two norms, RW models one after the other.
_FALCON = Architecture(
    blocks="transformer.h",
    linears=(
        "self_attention.query_key_value",
        "self_attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    site_inputs=(
        SiteInput("input_layernorm", ("query_key_value", "dense_h_to_4h"), "norm"),
        SiteInput("self_attention.query_key_value", ("dense",), None),
        SiteInput("mlp.dense_h_to_4h", ("dense_4h_to_h",), None),
    ),
    gated=False,
    attention="self_attention",
)


def _falcon_with_norms(attention: str, feed_forward: str) -> Architecture:
    first = SiteInput(attention, ("query_key_value",), "norm")
    second = SiteInput(feed_forward, ("dense_h_to_4h",), "norm")
    between, last = _FALCON.site_inputs[1:]
    return replace(_FALCON, site_inputs=(first, between, second, last))


# Mixtures of experts: as LLaMA but for the feed-forward. The router reads what the experts read, so
# no scale passes there.
_QWEN_3_MOE = Architecture(
    _LLAMA.blocks,
    _LLAMA.linears[:4],
    _LLAMA.site_inputs[:2],
    gated=True,
    experts="mlp.experts",
)
_MIXTRAL = replace(
    _QWEN_3_MOE,
    stored=(
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
)
_GRANITE_MOE = replace(
    _QWEN_3_MOE,
    experts="block_sparse_moe.experts",
    stored=(
        (".experts.gate_up_proj", ".input_linear.weight"),
        (".experts.down_proj", ".output_linear.weight"),
        (".router.weight", ".router.layer.weight"),
    ),
)

ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "SmolLM3ForCausalLM": _LLAMA,
    "GraniteForCausalLM": _LLAMA,
    "OlmoForCausalLM": _LLAMA,
    "Olmo2ForCausalLM": _OLMO_2,
    "Phi3ForCausalLM": _PHI_3,
    "Starcoder2ForCausalLM": _STARCODER_2,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_2,
    "OPTForCausalLM": _OPT,
    "GPT2LMHeadModel": _GPT_2,
    "GPTNeoXForCausalLM": _GPT_NEOX,
    "PhiForCausalLM": _PHI,
    "FalconForCausalLM": _FALCON,
    "MixtralForCausalLM": _MIXTRAL,
    "Qwen3MoeForCausalLM": _QWEN_3_MOE,
    "OlmoeForCausalLM": _QWEN_3_MOE,
    "GraniteMoeForCausalLM": _GRANITE_MOE,
}


def map_model(model: nn.Module) -> ModelMap:
    """Map a model that is not quantized yet.

    Raises QuantizeError if its architecture is unknown, if it is already quantized, or if its parts
    are not where the architecture has them.
    """
    architecture = type(model).__name__
    names = ARCHITECTURES.get(architecture)
    if names is None:
        raise QuantizeError(unknown("layer map for the architecture", architecture, ARCHITECTURES))
    config: Any = model.config
    if names is _OPT and not config.do_layer_norm_before:
        names = _OPT_350M
    if names is _FALCON:
        names = _falcon_of(model)
    if names.experts:
        names = _with_experts(model, names)
    blocks = _blocks(model)
    sites = tuple(
        _site(model, names, block, path) for block in range(blocks) for path in names.linears
    )
    return ModelMap(architecture, names, sites, blocks, _site_inputs(model, names, sites))


def stored_names(architecture: str) -> Callable[[str], str]:
    """Return a function from a weight's name in transformers to its name in files."""
    names = ARCHITECTURES.get(architecture)

    def renamed(name: str) -> str:
        for here, there in () if names is None else names.stored:
            name = name.replace(here, there)
        return name

    return renamed


def _with_experts(model: nn.Module, names: Architecture) -> Architecture:
    """Return the architecture extended by the layers of the experts in each block."""
    blocks = [model.get_submodule(f"{names.blocks}.{i}") for i in range(_blocks(model))]
    counts = {experts_in(block) for block in blocks}
    if len(counts) != 1 or 0 in counts:
        raise QuantizeError(
            f"this {type(model).__name__} has blocks without experts, or experts that are stored "
            "otherwise, which has no layer map"
        )
    paths, inputs = [], []
    for index in range(*counts):
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


def _blocks(model: Any) -> int:
    return int(model.config.num_hidden_layers)


def _falcon_of(model: nn.Module) -> Architecture:
    first = model.get_submodule(f"{_FALCON.blocks}.0")
    for norms in (("ln_attn", "ln_mlp"), ("input_layernorm", "post_attention_layernorm")):
        if all(hasattr(first, name) for name in norms):
            return _falcon_with_norms(*norms)
    return _FALCON


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
    model: nn.Module, names: Architecture, sites: Sequence[LinearSite]
) -> tuple[SiteInput, ...]:
    sizes = {site.kind: site for site in sites if site.block == 0}
    site_inputs = []
    for site_input in names.site_inputs:
        through = site_input.through if _passes(model, names, site_input) else None
        shared_heads = 1
        if site_input.source.endswith(".v_proj"):
            shared_heads = sizes[site_input.kinds[0]].k // sizes["v_proj"].n
        site_inputs.append(replace(site_input, through=through, shared_heads=shared_heads))
    return tuple(site_inputs)


def _passes(model: nn.Module, names: Architecture, site_input: SiteInput) -> bool:
    """Return True if a scale can be folded here in this model, as in its architecture."""
    if site_input.through is None:
        return False
    source: Any = model.get_submodule(f"{names.blocks}.0.{site_input.source}")
    if getattr(source, "weight", None) is None:  # norms of OLMo, and of OPT in Galactica
        return False
    config: Any = model.config
    if site_input.source.endswith(".v_proj"):
        return getattr(config, "clip_qkv", None) is None  # OLMo may clip values
    return site_input.source != "fc1" or config.activation_function == "relu"


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module called `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def linear_at(model: nn.Module, name: str) -> nn.Linear:
    """Return the dense layer of this name. Raises QuantizeError if it has been replaced."""
    layer = model.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        raise QuantizeError(f"{name} is quantized already: load the model anew")
    return layer


def weight_of(model: nn.Module, site: LinearSite) -> torch.Tensor:
    """Return the dense weights of a site [n, k], detached."""
    return linear_at(model, site.name).weight.detach()
