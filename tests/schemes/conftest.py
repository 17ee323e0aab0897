"""Small models with random weights, and tokens to calibrate them on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flexq_bench.schemes.calibration import Calibration
from flexq_bench.schemes.linear_layers import with_linear_layers

VOCABULARY = 128

sys.path.insert(0, str(Path(__file__).parent))  # for `families`


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Matrices this small take longest where several threads share them."""
    torch.set_num_threads(1)


@pytest.fixture
def tiny_llama(llama_config):
    """A fresh copy each call: 2 blocks, 4 heads on 2 key-value heads, K of 64 and 192."""
    from transformers import LlamaForCausalLM

    def build():
        torch.manual_seed(0)
        return _spread_out(LlamaForCausalLM(llama_config(64, 192, VOCABULARY)).eval())

    return build


@pytest.fixture
def tiny_opt():
    """A fresh copy each call: 2 blocks with biases and layer norms; changes: of its config."""
    from transformers import OPTConfig, OPTForCausalLM

    def build(**changes):
        torch.manual_seed(0)
        config = OPTConfig(
            hidden_size=64,
            ffn_dim=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            word_embed_proj_dim=64,
            **changes,
        )
        return _spread_out(OPTForCausalLM(config).eval())

    return build


@pytest.fixture
def build():
    """build(architecture): a small model of this class of transformers with random weights.

    changes: of its config.

    4 blocks, 6 heads on 2 key-value heads where it has them, K of 72 and 100, none a multiple of
    128; every other block attends to 8 tokens only where the architecture knows such blocks.
    """
    import transformers

    def built(architecture, **changes):
        sizes: dict[str, Any] = {
            "hidden_size": 72,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        }
        if architecture == "OPTForCausalLM":
            sizes |= {"ffn_dim": 100, "word_embed_proj_dim": 72}
        elif architecture == "GPT2LMHeadModel":
            sizes["n_inner"] = 100
        elif architecture == "GPTNeoXForCausalLM":
            sizes |= {"intermediate_size": 100, "rotary_pct": 0.5}
        elif architecture == "FalconForCausalLM":
            sizes["ffn_hidden_size"] = 100
        elif architecture == "GPTJForCausalLM":
            sizes |= {"n_inner": 100, "rotary_dim": 8}
        else:
            sizes |= {"intermediate_size": 100, "num_key_value_heads": 2, "head_dim": 16}
        if architecture.startswith(("Deepseek", "Glm4MoeLite")):  # latent attention
            sizes |= {"num_key_value_heads": 6, "kv_lora_rank": 24, "q_lora_rank": 32}
            sizes |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
            sizes |= {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1}
            del sizes["head_dim"]
        if "Moe" in architecture or architecture.startswith(("Mixtral", "Olmoe", "Deepseek")):
            sizes |= {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 48}
            sizes |= {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 80}
            sizes |= {"n_routed_experts": 4, "moe_num_experts": 4}
        if architecture == "OlmoeForCausalLM":  # norms all queries together
            del sizes["head_dim"]
        if architecture == "HeliumForCausalLM":  # its o_proj is square
            sizes["head_dim"] = 12
        if architecture == "StableLmForCausalLM":  # rotates an even part of hidden / heads
            del sizes["head_dim"]
            sizes["partial_rotary_factor"] = 0.5
        if architecture.startswith(("Gemma2", "Gemma3", "Mistral", "Qwen")):
            sizes["sliding_window"] = 8
        if architecture.startswith("Qwen"):
            sizes |= {"use_sliding_window": True, "max_window_layers": 2}
        if architecture.startswith("Gemma3"):
            sizes["sliding_window_pattern"] = 2
        torch.manual_seed(0)
        cls = getattr(transformers, architecture, None)
        if cls is None:
            pytest.skip(f"transformers {transformers.__version__} has no {architecture}")
        return with_linear_layers(_spread_out(cls(cls.config_class(**sizes, **changes)).eval()))

    return built


@pytest.fixture
def calibration():
    """4 segments of 32 tokens."""
    generator = torch.Generator().manual_seed(1)
    return Calibration(torch.randint(0, VOCABULARY, (4, 32), generator=generator))


@pytest.fixture
def text():
    """Tokens [2, 32] to compare outputs on."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, VOCABULARY, (2, 32), generator=generator)


@pytest.fixture(scope="session")
def shipped_llama():
    """The model that the repository ships, and tokens of its held-out text: 2 segments of 256."""
    from flexq_bench.accuracy.loading import load_model
    from flexq_bench.accuracy.texts import read_text, tokenize

    folder = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
    loaded = load_model(str(folder), device=torch.device("cpu"))
    return loaded.model, tokenize(read_text(str(folder / "heldout.txt")), loaded.tokenizer)[:512]


def _spread_out(model):
    """Weights large enough that blocks matter, with some channels larger than the others."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(2)
            elif "norm" in name:
                parameter.mul_(torch.exp(torch.randn(parameter.shape, generator=generator)))
    return model
