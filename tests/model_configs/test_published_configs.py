"""The layers of published configurations, against N and K computed by hand from their sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexq_bench.errors import UsageError
from flexq_bench.model_configs.layers import layers_of_config

Sizes = set[tuple[int, int]]


def llama(kind: str, hidden: int, ffn: int, heads: int, kv_heads: int, **more: Any) -> Any:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 4,
        "vocab_size": 32000,
        **more,
    }


def attention(hidden: int, heads: int, kv_heads: int, head_dim: int = 128) -> Sizes:
    return {((heads + 2 * kv_heads) * head_dim, hidden), (hidden, heads * head_dim)}


def gated(hidden: int, *widths: int) -> Sizes:
    return {size for ffn in widths for size in ((2 * ffn, hidden), (hidden, ffn))}


def plain(hidden: int, ffn: int) -> Sizes:
    return {(ffn, hidden), (hidden, ffn)}


QWEN2_VL = llama("qwen2_vl", 3584, 18944, 28, 4, vision_config={"depth": 2, "embed_dim": 1280})
QWEN2_7B = attention(3584, 28, 4) | gated(3584, 18944)
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LATENT = {(1536 + 512 + 64, 7168), (64 * 192, 1536), (64 * 256, 512), (7168, 64 * 128)}
CONFIGS: dict[str, tuple[dict[str, Any], Sizes]] = {
    "Mistral-7B-AWQ": (
        llama("mistral", 4096, 14336, 32, 8, head_dim=None)
        | {"quantization_config": {"quant_method": "awq", "bits": 4}, "torch_dtype": "float16"},
        attention(4096, 32, 8) | gated(4096, 14336),
    ),
    "Ministral-8B, layers that slide": (
        llama("mistral", 4096, 12288, 32, 8, layer_types=["full_attention"] * 4),
        attention(4096, 32, 8) | gated(4096, 12288),
    ),
    "Hunyuan without a dimension of heads": (
        llama("hunyuan_v1_dense", 4096, 14336, 32, 8, head_dim=None),
        attention(4096, 32, 8) | gated(4096, 14336),
    ),
    "a vocabulary without the padding token": (
        llama("phi3", 3072, 8192, 24, 8, pad_token_id=199999),
        attention(3072, 24, 8) | gated(3072, 8192),
    ),
    "Nemotron-Mini-4B": (
        llama("nemotron", 3072, 9216, 24, 8, head_dim=128, hidden_act="relu2"),
        attention(3072, 24, 8) | plain(3072, 9216),
    ),
    "GPT-J-6B": (
        {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 2, "n_inner": None},
        attention(4096, 16, 16, 256) | plain(4096, 16384),
    ),
    "Falcon-40B": (
        {"model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128}
        | {"num_kv_heads": 8, "num_hidden_layers": 2, "new_decoder_architecture": True},
        attention(8192, 128, 8, 64) | plain(8192, 32768),
    ),
    "MPT-7B": (
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 2, "expansion_ratio": 4},
        attention(4096, 32, 32) | plain(4096, 16384),
    ),
    "StarCoder": (
        {"model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 2}
        | {"n_inner": 24576, "multi_query": True},
        attention(6144, 48, 1) | plain(6144, 24576),
    ),
    "DBRX": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 2}
        | {"attn_config": {"kv_n_heads": 8, "rope_theta": 500000}}
        | {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
        attention(6144, 48, 8) | gated(6144, 10752),
    ),
    "JetMoE-8B": (
        {"model_type": "jetmoe", "hidden_size": 2048, "intermediate_size": 5632}
        | {"num_hidden_layers": 2, "kv_channels": 128, "num_key_value_heads": 16}
        | {"num_local_experts": 8},
        {(2 * 2048, 2048), (2048, 2048)} | gated(2048, 5632),
    ),
    "LongCat-Flash, experts without weights": (
        {"model_type": "longcat_flash", "num_layers": 2, "num_hidden_layers": 4},
        {(1536 + 576, 6144), (64 * 192, 1536), (64 * 256, 512), (6144, 64 * 128)}
        | gated(6144, 12288, 2048),
    ),
    "Kimi-K2, by its class": (
        DEEPSEEK_V3 | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
        LATENT | gated(7168, 18432, 2048),
    ),
    "a section of an unknown model": (
        {"model_type": "no-such-vl", "text_config": DEEPSEEK_V3, "vision_config": {}},
        LATENT | gated(7168, 18432, 2048),
    ),
    "no type, but a class": (
        llama("", 4096, 11008, 32, 32, model_type=None, architectures=["LlamaForCausalLM"]),
        attention(4096, 32, 32) | gated(4096, 11008),
    ),
    "Qwen2-VL-7B, sizes outside a section": (QWEN2_VL, QWEN2_7B),
    "Qwen2.5-VL-7B": (
        {"model_type": "qwen2_5_vl", "text_config": QWEN2_VL | {"model_type": "qwen2_5_vl_text"}},
        QWEN2_7B,
    ),
    "Qwen2.5-Omni-7B": (
        {
            "model_type": "qwen2_5_omni",
            "thinker_config": {"text_config": QWEN2_VL | {"model_type": "qwen2_5_omni_text"}},
        },
        QWEN2_7B,
    ),
    "Qwen3-VL-30B-A3B": (
        {
            "model_type": "qwen3_vl_moe",
            "text_config": llama("qwen3_vl_moe_text", 2048, 6144, 32, 4, head_dim=128)
            | {"moe_intermediate_size": 768, "num_experts": 128},
        },
        attention(2048, 32, 4) | gated(2048, 768),
    ),
    "Llama-3.2-11B-Vision, keys of images": (
        {
            "model_type": "mllama",
            "text_config": llama("mllama_text_model", 4096, 14336, 32, 8)
            | {"cross_attention_layers": [1]},
        },
        attention(4096, 32, 8) | gated(4096, 14336) | {(2 * 8 * 128, 4096)},
    ),
    "LLaVA, sizes outside a section": (
        llama("llava", 5120, 13824, 40, 40, mm_vision_tower="openai/clip-vit-large-patch14-336"),
        attention(5120, 40, 40) | gated(5120, 13824),
    ),
    "Mamba2-2.7B": (
        {"model_type": "mamba2", "hidden_size": 2560, "num_heads": 80, "head_dim": 64}
        | {"num_hidden_layers": 2, "n_groups": 1, "time_step_limit": [0.0, float("inf")]},
        {(2 * 5120 + 2 * 128 + 80, 2560), (2560, 5120)},
    ),
    "Falcon-H1-7B, saved by transformers 5": (
        llama("falcon_h1", 3072, 12288, 12, 2, head_dim=128)
        | {"mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256}
        | {"mamba_n_groups": 1, "time_step_limit": [0.0, {"__float__": "Infinity"}]},
        attention(3072, 12, 2)
        | gated(3072, 12288)
        | {(2 * 3072 + 2 * 256 + 24, 3072), (3072, 3072)},
    ),
    "Qwen3.5, projections stacked by engines": (
        {
            "model_type": "qwen3_5",
            "text_config": llama("qwen3_5_text", 4096, 12288, 16, 4, head_dim=256)
            | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
            | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        },
        {((2 * 16 + 2 * 4) * 256, 4096), (2 * 2048 + 2 * 4096, 4096), (64, 4096), (4096, 4096)}
        | gated(4096, 12288),
    ),
    "FLAN-T5-XL, cross-attention": (
        {"model_type": "t5", "d_model": 2048, "d_ff": 5120, "d_kv": 64, "num_heads": 32}
        | {"num_layers": 2, "feed_forward_proj": "gated-gelu"},
        attention(2048, 32, 32, 64) | gated(2048, 5120) | {(2 * 2048, 2048)},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configuration_has_expected_sizes(name: str, tmp_path: Path) -> None:
    config, sizes = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert {(layer.n, layer.k) for layer in layers_of_config(str(tmp_path))} == sizes


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (
            llama("internlm2", 6144, 16384, 48, 8, hidden_act="silu"),
            attention(6144, 48, 8) | gated(6144, 16384),
        ),
        (  # sizes under other names, and an activation without one
            {"model_type": "chatglm", "hidden_size": 4096, "ffn_hidden_size": 13696}
            | {"num_layers": 2, "num_attention_heads": 32, "kv_channels": 128}
            | {"multi_query_attention": True, "multi_query_group_num": 2},
            attention(4096, 32, 2) | gated(4096, 13696),
        ),
        (
            {"model_type": "exaone", "hidden_size": 4096, "intermediate_size": 14336}
            | {"num_attention_heads": 32, "num_key_value_heads": 8, "num_layers": 2}
            | {"activation_function": "silu"},
            attention(4096, 32, 8) | gated(4096, 14336),
        ),
        (
            {
                "model_type": "internvl_chat",
                "llm_config": llama("internlm2", 4096, 14336, 32, 8, hidden_act="silu"),
                "vision_config": {"hidden_size": 1024},
            },
            attention(4096, 32, 8) | gated(4096, 14336),
        ),
    ],
)
def test_unknown_type_is_read_by_llama_key_names(
    config: Any, sizes: Sizes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert {(layer.n, layer.k) for layer in layers_of_config(str(tmp_path))} == sizes
    assert "read as those of LLaMA's blocks" in caplog.text


# Kinds with a smaller share: other parts see or hear, experts without weights have rows in one of
# two tensors, or the configuration is refused.
SMALLER = {"git", "phi4_multimodal", "longcat_flash", "xlnet"}


@pytest.mark.slow
def test_layers_cover_nearly_all_decoder_weights(tmp_path: Path) -> None:
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    shares = {}
    for kind in sorted(NAMES):
        try:  # defaults of some types make no model
            config = transformers.CONFIG_MAPPING[kind]().get_text_config(decoder=True)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
        except Exception:
            continue
        if config.is_encoder_decoder:
            continue  # both halves are read
        config.save_pretrained(tmp_path)
        weights = sum(
            weight.numel()
            for name, weight in model.named_parameters()
            if weight.ndim > 1 and any(part.isdigit() for part in name.split(".")[:-2])
        )
        try:
            read = sum(s.n * s.k * s.count for s in layers_of_config(str(tmp_path)))
        except UsageError:
            read = 0
        shares[kind] = read / weights

    assert len(shares) > 100
    assert {kind for kind, share in shares.items() if not 0.9 < share <= 1} == SMALLER
