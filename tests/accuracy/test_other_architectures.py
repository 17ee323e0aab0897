"""Models of other architectures than LLaMA, from their folder to a verdict.

Random weights in the classes of transformers, sizes that no kernel likes: K of 72 and 100, an odd
vocabulary, heads that are not hidden / heads wide, biases, tied embeddings, sliding windows, BF16
in several files.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers

from flexq_bench.exit_codes import ExitCode

SIZES = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 513,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODELS = {
    "Qwen2ForCausalLM": {  # with biases on query, key and value
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "MistralForCausalLM": {"head_dim": 20, "sliding_window": 16},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "GemmaForCausalLM": {"head_dim": 32, "num_key_value_heads": 1},
    "Gemma2ForCausalLM": {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "Gemma3ForCausalLM": {"head_dim": 32, "sliding_window": 16},
    "GraniteForCausalLM": {"logits_scaling": 4.0, "embedding_multiplier": 6.0},
    "OlmoForCausalLM": {"clip_qkv": 1.0},  # norms without weights
    "Olmo2ForCausalLM": {},
    "Phi3ForCausalLM": {},  # fused layers
    "Starcoder2ForCausalLM": {},  # GELU, no gate
    "OPTForCausalLM": {  # as OPT-350M: norms after the layers, embeddings that are projected
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 40,
        "ffn_dim": 100,
        "dropout": 0.0,
    },
}
SITES = {"Phi3ForCausalLM": 8, "Starcoder2ForCausalLM": 12, "OPTForCausalLM": 12}
LAYERS = ("_proj", "c_fc", "fc1", "fc2")
EIGHT_BITS = (
    *("w8a8", "gptq-w8a8", "awq-w8a16", "smoothquant-w8a8", "abq-w8a8[epochs=1]"),
    *("omniquant-w8a8[epochs=1]",),
)
OTHERS = ("w2a8", "dgq-w4a8", "atom-w4a4[group=16]", "flexq-w6ax[a8_budget=0.25]")
POLICY = """
version = 1
schemes = ["w8a8"]
max_tokens = 189

[[perplexity]]
text = "heldout"
percent = 10

[parity]
kernels = ["flexq-w6a6", "flexq-w6a8"]
tolerance = 0.001
"""


@pytest.fixture
def folder(tmp_path, tiny_llama):
    """folder(architecture): a model in BF16 and several files, with tiny-llama's tokenizer."""

    def build(architecture: str) -> str:
        cls = getattr(transformers, architecture)
        torch.manual_seed(0)
        model = cls(cls.config_class(**(SIZES | MODELS[architecture])))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(f"{layer}.weight" in name for layer in LAYERS):
                    parameter.mul_(5)  # blocks that matter to what is predicted
                elif name.endswith("bias"):
                    parameter.normal_(std=0.3)
        path = tmp_path / architecture
        model.to(torch.bfloat16).save_pretrained(path, max_shard_size="40KB")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_llama / name, path)
        assert (path / "model.safetensors.index.json").is_file()
        return str(path)

    return build


@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_goes_all_the_way(cli, folder, tiny_llama, tmp_path, architecture):
    model, policy = folder(architecture), tmp_path / "policy.toml"
    where = ("--model", model, "--data", str(tiny_llama / "heldout.txt"), "--device", "cpu")
    calibration = ("--calibration", str(tiny_llama / "calibration.txt"))
    few = (*calibration, "--calibration-segments", "2", "--calibration-length", "32")

    ran = cli(
        *("accuracy", *where, *few, "--max-tokens", "189", "--json", "-"),
        *("--schemes", ",".join(EIGHT_BITS + OTHERS)),
    )
    assert ran.code == ExitCode.PASS, ran.error
    records = [json.loads(line) for line in ran.out.splitlines()]
    divergence = {r["scheme"]: r["value"] for r in records if r["metric"] == "kl_divergence"}
    assert divergence.keys() == {*EIGHT_BITS, *OTHERS}
    assert 20 * max(divergence[name] for name in EIGHT_BITS) < divergence["w2a8"]

    ran = cli(
        *("sensitivity", *where, *few, "--max-tokens", "189", "--bits", "w6a6"),
        *("--a8-budget", "0.25", "--json"),
    )
    assert ran.code == ExitCode.PASS, ran.error
    sites = json.loads(ran.out)["sites"]
    assert len(sites) == SITES.get(architecture, 14)

    policy.write_text(POLICY)
    ran = cli("gate", "accuracy", *where, "--policy", str(policy), "--scheme", "flexq-w6ax")
    assert ran.code == ExitCode.PASS, ran.out + ran.error
    assert f"{len(sites)} layers" in ran.out
