"""Decoders of transformers on which schemes and checkpoints are tested, in tiny sizes."""

from __future__ import annotations

import inspect
from typing import Any

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
    "GraniteForCausalLM",
    "MinistralForCausalLM",
    "HeliumForCausalLM",
    "Ernie4_5ForCausalLM",
    "SeedOssForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "StableLmForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "Exaone4ForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "ArceeForCausalLM",
    "NemotronForCausalLM",
    "Phi3ForCausalLM",
    "Starcoder2ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "OPTForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "GPTJForCausalLM",
    "BloomForCausalLM",
    "PhiForCausalLM",
    "FalconForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "GraniteMoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
)
# Sizes by every name that a configuration has for them.
_SIZES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (64, ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim")),
    (64, ("lru_width", "attention_hidden_size", "emb_dim")),
    (96, ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "d_ff")),
    (96, ("encoder_ffn_dim", "inner_dim", "dff", "d_inner", "intermediate_size_mlp")),
    (2, ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")),
    (2, ("decoder_layers", "num_decoder_layers", "num_encoder_layers")),
    (4, ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")),
    (4, ("encoder_attention_heads", "swa_num_attention_heads", "index_n_heads")),
    (2, ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "altup_num_inputs")),
    (16, ("head_dim", "d_kv", "attention_head_dim", "v_head_dim", "kv_channels", "swa_head_dim")),
    (16, ("swa_v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim")),
    (16, ("global_head_dim", "hidden_size_per_layer_input", "laurel_rank", "ssm_state_size")),
    (16, ("mamba_d_state", "mamba_d_head", "mamba_head_dim", "state_size", "linear_key_head_dim")),
    (16, ("linear_value_head_dim", "mamba_state_dim")),
    (513, ("vocab_size", "vocab_size_per_layer_input")),
    (64, ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_len")),
    (4, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    (2, ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")),
    (48, ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")),
    (80, ("shared_expert_intermediate_size", "shared_intermediate_size")),
    (80, ("moe_shared_expert_intermediate_size",)),
    (1, ("n_group", "topk_group", "mamba_n_groups", "num_hash_functions", "first_k_dense_replace")),
    (1, ("moe_layer_start_index", "n_shared_experts")),
    (2, ("linear_num_key_heads", "n_groups", "mamba_expand", "type_vocab_size")),
    (4, ("linear_num_value_heads", "mamba_dt_rank", "time_step_rank")),
    (24, ("kv_lora_rank",)),
    (32, ("q_lora_rank", "qk_head_dim", "q_head_dim")),
    (8, ("sliding_window", "attention_window", "window_size", "local_attention", "rotary_dim")),
    (8, ("attention_window_size", "mamba_n_heads", "mamba_num_heads", "mamba_chunk_size")),
    (8, ("chunk_size", "index_topk")),
    (128, ("mamba_d_ssm",)),
    (3, ("conv_L_cache",)),
    (0, ("pad_token_id", "bos_token_id", "eos_token_id")),
    (None, ("quantization_config",)),
    (True, ("is_decoder",)),
    (False, ("is_encoder_decoder",)),
)
# What some types need besides: blocks of each kind, sizes that fit together.
_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_SHARED = ["linear_attention", "hybrid", "hybrid"]
_INDEXER = {"budget": 8, "compress_ratio": 2, "n_heads": 2, "kv_heads": 1, "head_dim": 16}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MORE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _FULL,
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 2},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hrm_text": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": _FULL,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"interleave_moe_layer_step": 1, "attn_temperature_tuning": False},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16},
    "minimax": _FULL,
    "mistral": {"sliding_window": 64},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"], "num_hidden_layers": 3},
    "phi3": {"partial_rotary_factor": 0.5},
    "qwen3_5_moe_text": _FULL,
    "qwen3_5_text": _FULL,
    "qwen3_next": _FULL,
    "qwen4_exp_text": _FULL | {f"indexer_{name}": size for name, size in _INDEXER.items()},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds": False},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": _SHARED},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": _SHARED},
}


# Of the parts that read pictures.
_PICTURE_SIZES = {
    **dict.fromkeys(("hidden_size", "embed_dim", "projection_dim", "d_model", "hidden_dim"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads", "mlp_ratio"), 2),
    "encoder_attention_heads": 2,
    "head_dim": 16,
    "patch_size": 14,
    "num_channels": 3,
    "image_size": 28,
    "out_hidden_size": 64,
}
# Rotated pairs of a head for time, height and width.
_HALF_WIDTHS = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), (4, 2, 2)),
    **dict.fromkeys(("glm4v_text", "glm46v_text", "glm_ocr_text", "paddleocr_vl_text"), (4, 2, 2)),
    "glm4v_moe_text": (2, 1, 1),
}


def tiny_config(kind: str, **changes: Any) -> Any:
    """A configuration of a model type of transformers, shrunk to thousands of parameters."""
    import transformers

    cls = transformers.CONFIG_MAPPING[kind]
    values = _sizes_of(cls) | _MORE.get(kind, {}) | changes
    if "kv_lora_rank" in values:  # latent attention: keys for every head
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, section in (getattr(cls, "sub_configs", None) or {}).items():
        if not section.__name__.startswith("Auto"):
            values[name] = _sizes_of(section) | values.get(name, {})
    return cls(**values)


def tiny_multimodal_config(kind: str) -> Any:
    """A configuration of a type that reads pictures too, its decoder and the rest in tiny sizes."""
    import transformers

    cls = transformers.CONFIG_MAPPING[kind]
    described = vars(cls())
    sections = {
        name: section
        for name, section in described.items()
        if isinstance(section, transformers.PretrainedConfig)
    }
    ids = {
        name: 500 + index  # within the vocabulary
        for index, (name, value) in enumerate(described.items())
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value > 500
    }
    return cls(**ids, **{name: _tiny_section(name, own) for name, own in sections.items()})


def _tiny_section(name: str, section: Any) -> dict[str, Any]:
    kind = section.model_type
    if not any(word in name for word in ("text", "llm", "decoder", "language")):
        sizes = {n: v for n, v in _PICTURE_SIZES.items() if _is_number(getattr(section, n, None))}
        return {n: type(getattr(section, n))(v) for n, v in sizes.items()} | {"model_type": kind}
    values = tiny_config(kind).to_dict() | {"model_type": kind}
    turns = _HALF_WIDTHS.get(kind)
    if turns is not None:
        values["rope_parameters"] = _ROPE | {"mrope_section": list(turns)}
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sizes_of(cls: Any) -> dict[str, Any]:
    known = set(inspect.signature(cls.__init__).parameters)
    known |= set(getattr(cls, "__dataclass_fields__", {}))
    known |= set(getattr(cls, "attribute_map", {}))
    return {name: value for value, names in _SIZES for name in names if name in known}
