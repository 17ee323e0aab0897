"""Architectures whose weights have other names in files than in transformers."""

from __future__ import annotations

import copy
import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.reader import open_checkpoint

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 513,
    "max_position_embeddings": 32,
}
# Gated attention doubles the rows of q_proj; three of four blocks have linear attention.
GATED = SIZES | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MODELS = {
    "MixtralForCausalLM": SIZES | {"num_key_value_heads": 1, "num_local_experts": 2},
    "GPTNeoXForCausalLM": SIZES,
    "Qwen3NextForCausalLM": GATED | EXPERTS,
    "Qwen3_5ForConditionalGeneration": {"text_config": GATED, "vision_config": VISION},
    "Qwen3_5MoeForConditionalGeneration": {
        "text_config": GATED | EXPERTS,
        "vision_config": VISION,
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": SIZES | {"num_key_value_heads": 1, "head_dim": 16},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
    },
    # Transposed experts, and fused layers of the vision tower: converted, without codes.
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": SIZES | EXPERTS | {"num_key_value_heads": 1, "head_dim": 16},
        "vision_config": VISION,
    },
    "Kimi_K25ForConditionalGeneration": {
        "text_config": SIZES | LATENT,
        "vision_config": SIGLIP,
    },
    "GraniteMoeForCausalLM": SIZES | {"num_key_value_heads": 1, "num_local_experts": 4},
}
# Of Qwen's folders on the hub: a head that predicts several tokens, which transformers leaves out.
PREDICTORS = {
    name: torch.ones(32, 64, dtype=torch.float16)
    for name in ("mtp.fc.weight", "mtp.layers.0.mlp.down_proj.weight")
}
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
# No router: its name ends in `gate`.
QUANTIZED = re.compile(
    r"^(?!.*vis(?:ion|ual)).*\.(?:layers|blocks)\.\d+\..*(?<!gate|norm)\.weight$"
)
IDS = torch.arange(3, 27)[None]


@pytest.fixture
def a_model(tmp_path, tiny_llama):
    """a_model(architecture): a folder of INT8 codes, and the logits of what they stand for."""

    def build(architecture):
        torch.manual_seed(0)
        cls = getattr(transformers, architecture)
        model = cls(cls.config_class(**copy.deepcopy(MODELS[architecture]))).half().eval()
        folder = tmp_path / architecture
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_llama / name, folder)
        path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
        codes, values = {}, {}
        if architecture.startswith(("Qwen3Next", "Qwen3_5")):
            tensors |= PREDICTORS
        for name, weight in tensors.items():
            if weight.ndim != 2 or not QUANTIZED.search(name):
                codes[name] = values[name] = weight
                continue
            scale = weight.float().abs().amax(1, keepdim=True).div(127).half()
            codes[name] = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
            codes[f"{name}_scale"] = scale
            values[name] = codes[name].float() * scale.float()
        save_file(values, path, metadata={"format": "pt"})
        dense = cls.from_pretrained(folder, dtype=torch.float32).eval()
        save_file(codes, path)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "naive-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
            "ignore": ["lm_head", "embed_out", "re:.*gate$", "re:.*(visual|vision).*", "mtp.fc"],
        }
        (folder / "config.json").write_text(json.dumps(config))
        with torch.no_grad():
            return folder, dense(input_ids=IDS).logits

    return build


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("through", ["reference", "kernels"])
def test_renamed_weights_compute_the_same_logits(a_model, architecture, through):
    folder, expected = a_model(architecture)

    model = load_checkpoint(
        open_checkpoint(folder), device=torch.device("cpu"), through=through
    ).model

    with torch.no_grad():
        difference = (model(input_ids=IDS).logits - expected).abs().max()
    assert float(difference) < (1e-5 if through == "reference" else 1e-3)


def test_two_names_of_one_weight_are_refused(a_model):
    folder, _ = a_model("GPTNeoXForCausalLM")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["embed_out.weight"] * 2}, path)

    with pytest.raises(CheckpointError, match=r"embed_out.weight and lm_head.weight, two names"):
        open_checkpoint(folder)
