"""The layers of a model's configuration, against the catalog's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexq_bench.errors import UsageError
from flexq_bench.model_configs.layers import layers_of_config
from flexq_bench.workloads.model_spec import ModelSpec
from flexq_bench.workloads.models import load_catalog

# What transformers calls the dimensions, by the names of ModelSpec.
KEYS = {
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
}


def config_of(model: ModelSpec) -> dict[str, Any]:
    config = {theirs: getattr(model, ours) for ours, theirs in KEYS.items()}
    config["model_type"] = "gemma3_text" if model.block == "gemma3" else model.block
    if model.block == "opt":
        config |= {"ffn_dim": model.ffn, "word_embed_proj_dim": model.hidden}
    if model.experts is not None:
        experts = model.experts
        config |= {
            "num_experts": experts.count,
            "num_local_experts": experts.count,
            "n_routed_experts": experts.count,
            "num_experts_per_tok": experts.active,
            "moe_intermediate_size": experts.ffn,
            "n_shared_experts": experts.shared,
            "first_k_dense_replace": experts.dense_blocks,
        }
    if model.latent is not None:
        latent = model.latent
        config |= {
            "q_lora_rank": None,
            "kv_lora_rank": latent.kv_rank,
            "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
        }
        del config["head_dim"]  # there the width of what carries positions
    return config


@pytest.mark.parametrize("model", load_catalog().values(), ids=lambda model: model.name)
def test_catalog_has_the_layers_of_transformers(model: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(model)))

    built = layers_of_config(str(tmp_path))

    ours = {(s.name, s.n, s.k, s.count) for s in model.linear_layers()}
    assert {(s.name, s.n, s.k, s.count) for s in built} == ours


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (  # tensors [experts, K, N]
            {"model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 3},
            {("experts.gate_up_proj", 5760, 2880, 6), ("experts.down_proj", 2880, 2880, 6)},
        ),
        (  # a decoder inside a model that sees; weights [K, N]
            {"model_type": "gemma3", "text_config": {"num_hidden_layers": 3}},
            {("qkv_proj", 4096, 2304, 3), ("o_proj", 2304, 2048, 3)},
        ),
        ({"model_type": "gpt2", "n_layer": 2}, {("c_attn", 2304, 768, 2), ("c_fc", 3072, 768, 2)}),
        (
            {"model_type": "deepseek_v3", "num_hidden_layers": 4},
            {("fused_qkv_a_proj", 2112, 7168, 4), ("shared_experts.down_proj", 7168, 2048, 1)},
        ),
        (  # decoders beside an encoder of sound
            {"model_type": "whisper", "d_model": 1280, "decoder_layers": 32}
            | {"encoder_attention_heads": 20, "decoder_attention_heads": 20},
            {("qkv_proj", 3840, 1280, 32), ("kv_proj", 2560, 1280, 32)},
        ),
        ({"model_type": "speech_to_text"}, {("fc1", 2048, 256, 6), ("qkv_proj", 768, 256, 6)}),
        (  # matrices that mix four streams are no layers
            {"model_type": "gemma3n_text", "num_hidden_layers": 2, "num_kv_shared_layers": 0}
            | {"intermediate_size": [64, 64], "activation_sparsity_pattern": [0.0, 0.0]}
            | {"layer_types": ["full_attention"] * 2},
            {("qkv_proj", 3072, 2048, 2), ("linear_left", 64, 2048, 2)},
        ),
    ],
)
def test_other_models_have_their_layers(config: Any, layers: set[Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    found = {(s.name, s.n, s.k, s.count) for s in layers_of_config(str(tmp_path))}

    assert layers <= found
    assert not any("head" in name or name in ("gate", "router") for name, *_ in found)
    assert min(min(n, k) for _, n, k, _ in found) >= 16


SIZES_OF_NO_SUCH = """{"model_type": "no-such", "hidden_size": 64, "intermediate_size": 128,
"num_hidden_layers": 1, "num_attention_heads": 4, "num_experts": 4, "hidden_act": "gelu"}"""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": "no-such"}', "'no-such', which transformers"),
        (
            '{"model_type": "no-such", "num_experts": 0}',
            "and has no hidden_size, intermediate_size",
        ),
        (SIZES_OF_NO_SUCH, "num_experts is not LLaMA's"),
        (SIZES_OF_NO_SUCH.replace("num_experts", "vocab_size"), "names no gated hidden_act"),
        ('{"model_type": "clip"}', "clip is no language model"),
        ('{"model_type": "vit"}', "vit is no language model"),
        ('{"model_type": "hubert"}', "hubert is no language model"),
        ('{"_class_name": "UNet2DConditionModel"}', "a diffusion pipeline"),
        ('{"peft_type": "LORA"}', "an adapter: name the folder of its base model"),
        ('{"model_type": "xlnet", "n_layer": 1}', "38% of the weights of its blocks"),
        ('{"model_type": "llama", "hidden_size": "x"}', "'hidden_size'"),
        ('{"model_type": "llama", "hidden_size": 1000000000000}', "builds no language model"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "1,000 is the most"),
        ('{"model_type": "llama", "x": "' + "x" * (1 << 20) + '"}', "larger than 1,048,576 bytes"),
    ],
)
def test_configuration_without_language_model_is_refused(
    text: str, complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)

    with pytest.raises(UsageError) as caught:
        layers_of_config(str(file))

    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_of_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")

    with pytest.raises(UsageError, match="that of an adapter: name the folder of its base model"):
        layers_of_config(str(tmp_path))
