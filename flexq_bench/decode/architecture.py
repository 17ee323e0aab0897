"""Architecture of a decoder beyond its dimensions, from the catalog or a model's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flexq_bench.errors import UsageError
from flexq_bench.schemes.model_files import CONFIG, class_name
from flexq_bench.workloads.blocks import DECODED, Block, BlockType
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.model_spec import Experts, ModelSpec

_CLASSES: dict[BlockType, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "opt": "OPTForCausalLM",
}
_TYPES = {name: kind for kind, name in _CLASSES.items()}
# Fused linear layers of a block, in the order of the forward pass.
LAYERS: dict[Block, tuple[str, str, str, str]] = {
    "llama": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "opt": ("qkv_proj", "out_proj", "fc1", "fc2"),
}
OPT_POSITION_OFFSET = 2  # the table's first rows are for padding (transformers, modeling_opt.py)


@dataclass(frozen=True, slots=True)
class DecoderArchitecture:
    """Architecture of a decoder.

    head_dim: in LLaMA it may differ from hidden / heads. biased: fused layers with a bias. eps: of
    the norms. rope_theta: base of the rotary angles. rope_scaling: the keys of transformers'
    "llama3" scaling; empty: none. normalizes_shares: of a token's experts, to sum up to 1. The
    context of dimensions is at most the sliding window of
    attention, so that attention is always full.
    """

    dimensions: ModelSpec
    head_dim: int
    biased: tuple[str, ...]
    eps: float
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float], ...] = ()
    normalizes_shares: bool = True

    @property
    def block(self) -> Block:
        """The type of block whose forward pass is used."""
        return _decoded(self.dimensions)

    @property
    def class_name(self) -> str:
        """Name of the model's class in transformers."""
        return _CLASSES[self.dimensions.block]

    @property
    def norms_heads(self) -> bool:
        """Return True if every head of queries and keys has a norm."""
        return self.dimensions.block in ("qwen3", "qwen3_moe")

    @property
    def is_gated(self) -> bool:
        """Return True if the feed-forward has a gate (GLU)."""
        return self.block == "llama"

    def rotary(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Cosines and sines, FP32 [length, head_dim / 2, 2]; None: positions are learned."""
        if self.dimensions.learned_positions:
            return None
        half = self.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float32) * 2 / self.head_dim
        frequencies = _scaled(1.0 / self.rope_theta**exponents, dict(self.rope_scaling))
        angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
        return torch.stack([angles.cos(), angles.sin()], dim=-1).to(device)


class NotDecodedError(UsageError):
    """An architecture without a forward pass here; transformers' modules decode it (modules)."""


def check_capacity(capacity: int, context: int | None, model: str) -> None:
    """Raise UsageError if sequences are longer than the model's context."""
    if context is not None and capacity > context:
        raise UsageError(
            f"{model} has a context of {context} tokens, and prompt and answer make {capacity}: "
            "ask for fewer"
        )


def of_catalog(model: ModelSpec) -> DecoderArchitecture:
    """Return the architecture of a catalog model.

    eps and rotary angles are those of LLaMA; they don't affect speed. Raises UsageError for a block
    type that decode does not support.
    """
    _decoded(model)
    biased = {"opt": LAYERS["opt"], "qwen2": ("qkv_proj",)}.get(model.block, ())
    return DecoderArchitecture(model, model.head_dim, biased, 1e-5)


def _decoded(model: ModelSpec) -> Block:
    if model.block not in DECODED:
        raise UsageError(
            f"{model.name} has blocks of type {model.block}, and decode has {', '.join(DECODED)}: "
            "measure its layers (sweep --model), or pick another"
        )
    return DECODED[model.block]


def of_config(config: Mapping[str, Any], name: str) -> DecoderArchitecture:
    """Parse the architecture from a config.json. Raises UsageError."""
    found_class = _class_of(config)
    if found_class not in _TYPES:
        raise NotDecodedError(
            f"{name} is a {found_class}, and decode has {', '.join(_TYPES)}: pick another"
        )
    block = _TYPES[found_class]
    kind = config.get("model_type", block)
    if kind != block:
        raise UsageError(
            f"{CONFIG} of {name} has the class {found_class} and the model type "
            f"{kind!r:.40}, which is another architecture: download it again"
        )
    try:
        return _opt(config, name) if block == "opt" else _llama(config, name, block)
    except WorkloadError as error:
        raise UsageError(str(error)) from error
    except KeyError as error:
        raise UsageError(f"{CONFIG} of {name} has no {error}: download it again") from error
    except _FieldError as error:
        raise UsageError(f"{CONFIG} of {name}: {error}: download it again") from error


# Of transformers' classes, for keys that are missing.
_DEFAULTS: Mapping[BlockType, Mapping[str, float]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
}

_EXPERT_SIZE: Mapping[BlockType, str] = {
    "mixtral": "intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
}


class _FieldError(ValueError):
    """Invalid value of a field of a configuration."""


def _class_of(config: Mapping[str, Any]) -> str:
    """The name of the model's class, or if missing, the class of its model type."""
    kind: Any = config.get("model_type")
    return class_name(config) or _CLASSES.get(kind, f"model of type {kind!r}")


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or value < 1:
        raise _FieldError(f"{key} is a number of 1 or more, got {value!r}")
    return value


def _positive(fields: Mapping[str, Any], key: str, default: float) -> float:
    value = fields.get(key, default)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _FieldError(f"{key} is a number above 0, got {value!r}")
    return float(value)


def _llama(config: Mapping[str, Any], name: str, block: BlockType) -> DecoderArchitecture:
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    if config.get("hidden_act", "silu") != "silu":
        raise NotDecodedError(
            f"{name} has {config['hidden_act']} where decode has silu: pick another"
        )
    config = {**_DEFAULTS.get(block, {}), **config}
    # Null is as if missing: as many heads of keys as of queries, and hidden / heads channels each.
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    dimensions = ModelSpec(
        name=name,
        family=name,
        block=block,
        hidden=hidden,
        ffn=_count(config, "intermediate_size"),
        layers=_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads if kv_heads is None else _count(config, "num_key_value_heads"),
        vocab=_count(config, "vocab_size"),
        context=_context(config, block),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        learned_positions=False,
        source="config.json",
        head_dim=0 if head_dim is None else _count(config, "head_dim"),
        experts=_experts(config, name, block),
    )
    # transformers prefers the older key, which guides for long contexts let users add.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise _FieldError(f"the parameters of its rotary angles are a table, got {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise NotDecodedError(
            f"{name} scales its rotary angles by {kind!r}: decode has default, llama3"
        )
    scaling = tuple(
        (key, _positive({key: rope[key]}, key, 0))
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
        if kind == "llama3"
    )
    if dimensions.head_dim % 2:
        raise _FieldError(f"rotary angles turn pairs of channels, a head has {dimensions.head_dim}")
    attention: tuple[str, ...] = ("qkv_proj", "o_proj") if config.get("attention_bias") else ()
    if block == "qwen2":  # its configuration has no key for biases
        attention = ("qkv_proj",)
    feed_forward = ("gate_up_proj", "down_proj") if config.get("mlp_bias") else ()
    return DecoderArchitecture(
        dimensions,
        dimensions.head_dim,
        (*attention, *feed_forward),
        _positive(config, "rms_norm_eps", 1e-6),
        _positive({**config, **rope}, "rope_theta", 10000.0),
        scaling,
        block != "qwen3_moe" or bool(config.get("norm_topk_prob", False)),
    )


def _experts(config: Mapping[str, Any], name: str, block: BlockType) -> Experts | None:
    """The experts of every block; None: of a dense model."""
    if block not in _EXPERT_SIZE:
        return None
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise NotDecodedError(f"{name} has blocks without experts: pick another")
    # Qwen3-MoE's older configurations call it num_experts.
    count = "num_experts" if "num_experts" in config else "num_local_experts"
    sizes = (count, "num_experts_per_tok", _EXPERT_SIZE[block])
    return Experts(*(_count(config, size) for size in sizes))


def _context(config: Mapping[str, Any], block: BlockType) -> int:
    """Longest sequence with full attention, in tokens."""
    context = _count(config, "max_position_embeddings")
    slides = block in ("mistral", "mixtral") or config.get("use_sliding_window")
    if slides and config.get("sliding_window") is not None:
        return min(context, _count(config, "sliding_window"))
    return context


def _opt(config: Mapping[str, Any], name: str) -> DecoderArchitecture:
    hidden = _count(config, "hidden_size")
    if not config.get("do_layer_norm_before", True) or config.get(
        "word_embed_proj_dim", hidden
    ) not in (None, hidden):
        raise NotDecodedError(
            f"{name} norms after its layers or projects its embeddings, as OPT-350M: "
            "pick another size"
        )
    if config.get("_remove_final_layer_norm") or not config.get(
        "layer_norm_elementwise_affine", True
    ):
        raise NotDecodedError(f"{name} lacks a final norm, or weights of its norms: pick another")
    activation = config.get("activation_function", "relu")
    if activation != "relu":
        raise NotDecodedError(f"{name} has {activation} where decode has relu: pick another")
    dimensions = ModelSpec(
        name=name,
        family=name,
        block="opt",
        hidden=hidden,
        ffn=_count(config, "ffn_dim"),
        layers=_count(config, "num_hidden_layers"),
        heads=_count(config, "num_attention_heads"),
        kv_heads=_count(config, "num_attention_heads"),
        vocab=_count(config, "vocab_size"),
        context=_count(config, "max_position_embeddings"),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        learned_positions=True,
        source="config.json",
    )
    biased = LAYERS["opt"] if config.get("enable_bias", True) else ()
    return DecoderArchitecture(dimensions, dimensions.head_dim, biased, 1e-5)


def _scaled(frequencies: torch.Tensor, scaling: Mapping[str, float]) -> torch.Tensor:
    """Scale frequencies as Llama 3: low ones by 1 / factor, high ones not, blended between."""
    if not scaling:
        return frequencies
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    weight = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (weight + (1 - weight) / scaling["factor"])
