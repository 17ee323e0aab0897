"""Tables of the linear layers of each type of decoder block.

Block types have the names of model_type in transformers. The sizes of a layer are names of widths,
whose values `ModelSpec.widths` has for each model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Block = Literal["llama", "opt"]  # forward passes implemented by `decode`
BlockType = Literal[
    "llama",
    "opt",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "phi3",
    "gpt_neox",
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
]
BLOCK_TYPES: tuple[BlockType, ...] = get_args(BlockType)
# Block types that `decode` supports -> their forward pass. Qwen2 adds biases to LLaMA's, Qwen3
# norms of heads; Mistral equals LLaMA within its sliding window; Mixtral and Qwen3-MoE add experts.
DECODED: Mapping[BlockType, Block] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "mixtral": "llama",
    "qwen3_moe": "llama",
    "opt": "opt",
}
Place = Literal["every", "dense", "routed", "shared"]


@dataclass(frozen=True, slots=True)
class Projection:
    """A weight matrix [N,K] of a block. n, k: names of widths.

    fused: name of the matrix in which a serving engine stacks projections of one input along N;
    empty: not stacked. place: "every" block, blocks with a "dense" feed-forward, each "routed"
    expert, or the "shared" experts.
    """

    name: str
    n: str
    k: str
    fused: str = ""
    place: Place = "every"


def _attention(output: str) -> tuple[Projection, ...]:
    return (
        Projection("q_proj", "queries", "hidden", "qkv_proj"),
        Projection("k_proj", "keys", "hidden", "qkv_proj"),
        Projection("v_proj", "keys", "hidden", "qkv_proj"),
        Projection(output, "hidden", "queries"),
    )


def _gated(place: Place, prefix: str = "", ffn: str = "ffn") -> tuple[Projection, ...]:
    return (
        Projection(f"{prefix}gate_proj", ffn, "hidden", f"{prefix}gate_up_proj", place),
        Projection(f"{prefix}up_proj", ffn, "hidden", f"{prefix}gate_up_proj", place),
        Projection(f"{prefix}down_proj", "hidden", ffn, "", place),
    )


_LLAMA = (*_attention("o_proj"), *_gated("dense"))
_ROUTED = _gated("routed", "experts.", "expert_ffn")

LAYERS: Mapping[BlockType, tuple[Projection, ...]] = {
    "llama": _LLAMA,
    "opt": (
        *_attention("out_proj"),
        Projection("fc1", "ffn", "hidden"),
        Projection("fc2", "hidden", "ffn"),
    ),
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma3": _LLAMA,
    # Q, K and V, and gate and up, are stacked in its checkpoints.
    "phi3": (
        Projection("qkv_proj", "queries_keys_values", "hidden"),
        Projection("o_proj", "hidden", "queries"),
        Projection("gate_up_proj", "gate_up", "hidden"),
        Projection("down_proj", "hidden", "ffn"),
    ),
    "gpt_neox": (
        Projection("query_key_value", "queries_keys_values", "hidden"),
        Projection("dense", "hidden", "queries"),
        Projection("dense_h_to_4h", "ffn", "hidden"),
        Projection("dense_4h_to_h", "hidden", "ffn"),
    ),
    "mixtral": (*_attention("o_proj"), *_ROUTED),
    "qwen3_moe": (*_attention("o_proj"), *_ROUTED),
    # Multi-head latent attention without compressed queries (arXiv:2405.04434, section 2.1 and
    # appendix B.1): keys and values are projections of a latent vector; a part of the keys has
    # RoPE.
    "deepseek_v2": (
        Projection("q_proj", "latent_queries", "hidden"),
        Projection("kv_a_proj_with_mqa", "latent_and_positions", "hidden"),
        Projection("kv_b_proj", "latent_keys_values", "latent"),
        Projection("o_proj", "hidden", "latent_values"),
        *_gated("dense"),
        *_ROUTED,
        *_gated("shared", "shared_experts.", "shared_ffn"),
    ),
}
