"""Architectures whose layers are named, fused or packed unlike LLaMA's, mixtures of experts too."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.weight_distances import weight_distances
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.decode.kernel_linear import KernelLinear
from flexq_bench.exit_codes import ExitCode
from flexq_bench.schemes.calibration import Calibration
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.linear_layers import replace_module, with_linear_layers
from flexq_bench.schemes.model_files import find_model
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.registry import resolve

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 513,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MIXTURE = {"intermediate_size": 96, "num_key_value_heads": 2, "num_experts_per_tok": 2}
# Multi-head latent attention; queries, keys and values have other sizes than hidden / heads.
LATENT = (
    MIXTURE
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 48}
    | {"kv_lora_rank": 24, "q_lora_rank": 32, "n_group": 1, "topk_group": 1}
    | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
)
# architecture: its settings, linear layers of a block, and those of other models
FAMILIES = {
    "GPT2LMHeadModel": ({"n_inner": 96}, 4),
    "GPTNeoXForCausalLM": ({"intermediate_size": 96, "rotary_pct": 0.5}, 4),
    "PhiForCausalLM": ({"intermediate_size": 96, "num_key_value_heads": 2}, 6),
    "FalconForCausalLM": (
        {"ffn_hidden_size": 96, "new_decoder_architecture": True, "num_kv_heads": 2},
        4,
    ),
    "MixtralForCausalLM": (MIXTURE | {"num_local_experts": 4}, 4 + 4 * 3),
    "Qwen3MoeForCausalLM": (
        MIXTURE | {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16},
        4 + 4 * 3,
    ),
    "OlmoeForCausalLM": (MIXTURE | {"num_experts": 4}, 4 + 4 * 3),
    "Qwen2MoeForCausalLM": (
        MIXTURE
        | {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
        4 + 3 + 4 * 3,
    ),
    "GraniteMoeForCausalLM": (MIXTURE | {"num_local_experts": 4}, 4 + 4 * 3),  # packed in files
}
# Mixtures whose first block is dense and whose second has four experts, and their linear layers.
PARTLY_DENSE = {
    "Qwen3MoeForCausalLM": (
        FAMILIES["Qwen3MoeForCausalLM"][0] | {"mlp_only_layers": [0]},
        7 + 4 + 4 * 3,
    ),
    "Qwen2MoeForCausalLM": (
        FAMILIES["Qwen2MoeForCausalLM"][0] | {"mlp_only_layers": [0]},
        7 + 4 + 3 + 4 * 3,
    ),
    "Glm4MoeForCausalLM": (
        MIXTURE | {"n_routed_experts": 4, "moe_intermediate_size": 48, "head_dim": 16},
        7 + 4 + 3 + 4 * 3,
    ),
    "Ernie4_5_MoeForCausalLM": (
        MIXTURE
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48}
        | {"tie_word_embeddings": False},
        7 + 4 + 3 + 4 * 3,
    ),
    "DeepseekV2ForCausalLM": (
        LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1},
        7 + 4 + 3 + 4 * 3,
    ),
}
MIXTURES = list(FAMILIES)[4:]
# Their experts are named and packed as Mixtral's or as Qwen2's beside a shared one.
LIKE_OTHERS = ("Qwen3MoeForCausalLM", "OlmoeForCausalLM")


def of_each_layout(architectures):
    """The architectures as cases; those whose layout another one has are slow."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ())
        for name in architectures
    ]


GATED = {"intermediate_size": 96, "num_key_value_heads": 2}
# The same of architectures whose maps differ from those above in what a scale passes through, and
# of those that share such a map.
FOLDED = {
    "CohereForCausalLM": (GATED | {"use_qk_norm": True}, 7),
    "StableLmForCausalLM": (GATED | {"use_parallel_residual": True}, 7),
    "Glm4ForCausalLM": (GATED | {"head_dim": 16}, 6),
    "ArceeForCausalLM": (GATED, 6),
    "NemotronForCausalLM": (GATED, 6),
    "GPTJForCausalLM": ({"n_inner": 96, "rotary_dim": 8}, 6),
    "BloomForCausalLM": ({}, 4),
    "DeepseekV3ForCausalLM": (LATENT | {"first_k_dense_replace": 2}, 5 + 3),
}
ALIKE = {
    "Cohere2ForCausalLM": (GATED, 7),
    "GlmForCausalLM": (GATED | {"head_dim": 16}, 6),
    "Olmo3ForCausalLM": (GATED, 7),
    "Exaone4ForCausalLM": (GATED | {"sliding_window": 16, "sliding_window_pattern": 2}, 7),
    "MinistralForCausalLM": (GATED | {"head_dim": 20}, 7),
    "HeliumForCausalLM": (GATED | {"head_dim": 16}, 7),
    "Ernie4_5ForCausalLM": (GATED | {"use_bias": True}, 7),
    "SeedOssForCausalLM": (GATED | {"head_dim": 16}, 7),
    "HunYuanDenseV1ForCausalLM": (GATED | {"head_dim": 16}, 7),
    "Glm4MoeLiteForCausalLM": (LATENT | {"mlp_layer_types": ["dense"] * 2}, 5 + 3),
}
IDS = torch.arange(3, 51).view(2, 24) * 7 % 513
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
def family(tmp_path, tiny_llama):
    """family(architecture, **changes): a model of FP16 weights as transformers has it, its folder.

    With tiny-llama's tokenizer and blocks that matter to what is predicted.
    """

    def build(architecture, **changes):
        cls = getattr(transformers, architecture)
        torch.manual_seed(0)
        known = PARTLY_DENSE | FAMILIES | FOLDED | ALIKE
        settings = SIZES | known[architecture][0] | changes
        model = cls(cls.config_class(**settings)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "embed" not in name:
                    parameter.mul_(5)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.3)
                parameter.copy_(parameter.half())
        path = tmp_path / architecture
        model.save_pretrained(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_llama / name, path)
        return model, path

    return build


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def divergence(original, other):
    p, q = original.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def quantized(path, scheme):
    model = load_model(str(path), device=CPU).model
    resolve(scheme).quantize(model)
    return model


def write_checkpoint(path, scheme, out, dtype=torch.float32):
    source = open_source(find_model(str(path)))
    return quantize_checkpoint(source, resolve(scheme), out, device=CPU, dtype=dtype)


@pytest.mark.parametrize("architecture", of_each_layout(FAMILIES))
def test_exactly_the_layers_of_blocks_are_quantized(family, architecture):
    original, path = family(architecture)
    expected = logits(original)

    model = quantized(path, "w8a16")

    layers = {n for n, m in model.named_modules() if isinstance(m, FakeQuantizedLinear)}
    blocks = map_model(load_model(str(path), device=CPU).model)
    assert len(layers) == 2 * FAMILIES[architecture][1]
    assert all(name.startswith(f"{blocks.path}.") for name in layers)
    assert sum(s.n * s.k for s in blocks.sites) == sum(
        parameter.numel()
        for name, parameter in original.named_parameters()
        if name.startswith(blocks.path)
        and name.endswith(("weight", "proj"))
        and parameter.ndim > 1
        and not name.endswith(("gate.weight", "router.weight"))
    )
    dense = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name.rpartition(".")[2] for name in dense} <= {"lm_head", "shared_expert_gate"}
    own = dict(model.named_parameters())
    for name, parameter in original.named_parameters():
        if name in own:  # embeddings, norms, routers, the head
            torch.testing.assert_close(own[name], parameter, rtol=0, atol=0)

    torch.testing.assert_close(logits(quantized(path, "w16a16")), expected, rtol=1e-4, atol=1e-4)
    near = divergence(expected, logits(model))
    assert 0 < 100 * near < divergence(expected, logits(quantized(path, "w2a16")))


@pytest.mark.parametrize(
    "architecture", [*FOLDED, *(pytest.param(name, marks=pytest.mark.slow) for name in ALIKE)]
)
def test_folded_scales_cancel_out(family, architecture):
    original, path = family(architecture)
    with torch.no_grad():
        for parameter in original.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    original.save_pretrained(path)
    expected = logits(original)
    model = load_model(str(path), device=CPU).model

    resolve("smoothquant-w8a8").quantize(model, Calibration(IDS))

    layers = [name for name, m in model.named_modules() if isinstance(m, FakeQuantizedLinear)]
    assert len(layers) == 2 * (FOLDED | ALIKE)[architecture][1]
    near = divergence(expected, logits(model))
    assert 0 < 100 * near < divergence(expected, logits(quantized(path, "w2a16")))


@pytest.mark.parametrize("scheme", ["gptq-w4a16", "awq-w4a16"])
@pytest.mark.parametrize(
    "architecture",
    of_each_layout(["GPT2LMHeadModel", "PhiForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM"]),
)
def test_swapped_rows_are_found_and_learned_rounding_is_not(family, architecture, scheme):
    original = with_linear_layers(family(architecture)[0])
    model = copy.deepcopy(original)
    resolve(scheme).quantize(model, Calibration(torch.randint(3, 513, (4, 48))), seed=0)
    assert weight_distances(model, original).findings == ()
    layers = [n for n, m in model.named_modules() if isinstance(m, FakeQuantizedLinear)]
    name = layers[-1]
    layer = model.get_submodule(name).layer
    values = layer.weight.values.clone()
    values[[3, 9]] = values[[9, 3]]
    damaged = replace(layer, weight=replace(layer.weight, values=values))
    replace_module(model, name, FakeQuantizedLinear(name, damaged))
    findings = weight_distances(model, original).findings
    assert [finding.name for finding in findings] == [f"weights.{name}"]


@pytest.mark.parametrize("architecture", of_each_layout(FAMILIES))
def test_checkpoint_equals_the_quantized_model(family, tmp_path, architecture):
    _, path = family(architecture)
    written = write_checkpoint(path, "flexq-w6ax", tmp_path / "out")

    stored = open_checkpoint(written.folder)
    expected = logits(quantized(path, "flexq-w6ax"))
    again = load_checkpoint(stored, device=CPU, through="reference").model
    torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-5)
    kernels = load_checkpoint(stored, device=CPU, through="kernels").model
    computed = [m for m in kernels.modules() if isinstance(m, KernelLinear)]
    assert len(computed) == len(stored.layers)
    assert divergence(expected, logits(kernels)) < 1e-3


@pytest.mark.parametrize(
    ("architecture", "defaults"),
    [
        ("GlmForCausalLM", {"head_dim": 128, "num_key_value_heads": 2}),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 768}),
    ],
)
def test_missing_sizes_are_the_defaults_of_transformers(family, tmp_path, architecture, defaults):
    original, path = family(architecture, **defaults)
    config = json.loads((path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in defaults}
    (path / "config.json").write_text(json.dumps(kept))

    written = write_checkpoint(path, "w8a16", tmp_path / "out")

    again = load_checkpoint(open_checkpoint(written.folder), device=CPU, through="reference")
    assert 0 < divergence(logits(original), logits(again.model)) < 1e-3


@pytest.mark.parametrize(
    ("architecture", "own"),
    [("PhiForCausalLM", False), ("GPT2LMHeadModel", True), ("MixtralForCausalLM", True)],
)
def test_separated_layers_are_stored_in_own_format(family, tmp_path, architecture, own):
    written = write_checkpoint(family(architecture)[1], "w8a16", tmp_path / "out")

    section = json.loads((written.folder / "config.json").read_text())["quantization_config"]

    assert (section["format"] == "flexq-bench") == own
    assert open_checkpoint(written.folder).content_hash == written.content_hash


@pytest.mark.parametrize("architecture", of_each_layout(MIXTURES))
def test_down_proj_of_every_expert_has_8_bit_activations(family, architecture):
    model = quantized(family(architecture)[1], "flexq-w6ax")

    bits = {
        name.rpartition(".")[2]: module.layer.activation_format.bits
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear) and ".experts." in name
    }

    assert bits == {"gate_proj": 6, "up_proj": 6, "down_proj": 8}


@pytest.mark.parametrize(
    "scheme",
    [
        *("gptq-w8a8", "awq-w8a16", "smoothquant-w8a8[alpha=none]", "dgq-w4a8[static=true]"),
        *("atom-w4a4[group=16]", "omniquant-w8a8[epochs=1]"),
    ],
)
def test_expert_without_tokens_is_rounded_to_nearest(family, scheme, caplog):
    model, _ = family("MixtralForCausalLM", num_experts_per_tok=1)
    with torch.no_grad():
        for block in model.model.layers:  # the first two experts share all tokens
            block.mlp.gate.weight[1] = -block.mlp.gate.weight[0]
            block.mlp.gate.weight[2:] = 0
    model = with_linear_layers(model)
    expected = logits(model)

    resolve(scheme).quantize(model, Calibration(IDS))

    assert divergence(expected, logits(model)) < 0.2
    assert "mlp.experts.3.down_proj saw no token" in caplog.text
    layer = model.model.layers[0].mlp.experts[3].down_proj
    assert torch.isfinite(layer.weight).all()


def test_shared_expert_is_trained(family):
    model = with_linear_layers(family("Qwen2MoeForCausalLM")[0])
    expected = logits(model)

    resolve("omniquant-w8a8[epochs=1]").quantize(model, Calibration(IDS))

    layer = model.model.layers[0].mlp.shared_expert.down_proj
    assert isinstance(layer, FakeQuantizedLinear)
    assert 0 < divergence(expected, logits(model)) < 1e-3


def with_stored_weights(model, folder):
    """A model of transformers with the codes times scales of a w8a16 checkpoint.

    Each row is one group; its codes plus 128 are the bytes of its words. The experts of a block are
    one tensor, gates before the other layers.
    """
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)

    def weight(layer):
        codes = tensors[f"{layer}.weight_packed"].view(torch.uint8).double() - 128
        return (codes * tensors[f"{layer}.weight_scale"].double()).float()

    def named(name):
        experts, _, packed = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        if name in tensors:
            return tensors[name].float()
        if packed == "weight":
            return weight(experts)
        return torch.stack(
            [
                torch.cat([weight(f"{experts}.{i}.{part}") for part in parts[packed]])
                for i in range(4)
            ]
        )

    model.load_state_dict({name: named(name) for name in model.state_dict()})
    return model


@pytest.mark.parametrize("architecture", PARTLY_DENSE)
def test_mixture_with_dense_block_equals_its_stored_codes(family, tmp_path, architecture):
    settings, layers = PARTLY_DENSE[architecture]
    model, path = family(architecture, **settings)
    biases = {n: t for n, t in model.state_dict().items() if n.endswith("correction_bias")}
    for tensor in biases.values():  # of experts, with differences that FP16 rounds away
        tensor.copy_(6 + 1e-3 * torch.arange(4.0))
    model.save_pretrained(path)
    before = logits(model)

    written = write_checkpoint(path, "w8a16", tmp_path / "out", torch.float16)

    stored = open_checkpoint(written.folder)
    assert len(stored.layers) == layers
    loaded = load_checkpoint(stored, device=CPU, through="reference")
    for name, tensor in biases.items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    by_hand = with_stored_weights(model, written.folder)
    assert 0 < divergence(before, logits(by_hand)) < 1e-3
    torch.testing.assert_close(logits(loaded.model), logits(by_hand), rtol=1e-4, atol=1e-4)
    found, expected = (perplexity(m, IDS.flatten(), context=24) for m in (loaded.model, by_hand))
    assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-6)


@pytest.mark.parametrize(
    "scheme",
    [
        *("gptq-w8a8", "awq-w8a16", "smoothquant-w8a8[alpha=none]", "dgq-w4a8", "duquant-w8a8"),
        *("atom-w8a8[group=16]", "omniquant-w8a8[epochs=1]", "flexq-w6ax[a8_budget=0.25]"),
    ],
)
def test_dense_block_and_block_of_experts_are_calibrated(family, scheme):
    model, _ = family("Qwen2MoeForCausalLM", mlp_only_layers=[0])
    model = with_linear_layers(model)
    expected = logits(model)

    resolve(scheme).quantize(model, Calibration(IDS))

    layers = [m for m in model.modules() if isinstance(m, FakeQuantizedLinear)]
    assert len(layers) == PARTLY_DENSE["Qwen2MoeForCausalLM"][1]
    assert 0 < divergence(expected, logits(model)) < 0.05


def test_weights_in_an_unknown_layout_are_refused(family):
    with pytest.raises(QuantizeError, match="86% of the weights of its blocks have an unknown"):
        map_model(family("MixtralForCausalLM")[0])


EIGHT_BITS = (
    *("w8a8", "gptq-w8a8", "awq-w8a16", "smoothquant-w8a8", "abq-w8a8[epochs=1]"),
    *("omniquant-w8a8[epochs=1]",),
)
OTHERS = ("w2a8", "dgq-w4a8", "atom-w4a4[group=16]", "flexq-w6ax[a8_budget=0.25]")


# Sizes that no kernel likes: K of 72 and 100, an odd vocabulary, heads that are not hidden / heads
# wide, biases, tied embeddings, sliding windows.
ODD_SIZES = {
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
WHOLE_MODELS = {
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
LAYER_COUNTS = {"Phi3ForCausalLM": 8, "Starcoder2ForCausalLM": 12, "OPTForCausalLM": 12}
SCALED_LAYERS = ("_proj", "c_fc", "fc1", "fc2")


@pytest.fixture
def odd_model(tmp_path, tiny_llama):
    """odd_model(architecture): a model in BF16 and several files, with tiny-llama's tokenizer."""

    def build(architecture):
        cls = getattr(transformers, architecture)
        torch.manual_seed(0)
        model = cls(cls.config_class(**(ODD_SIZES | WHOLE_MODELS[architecture])))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(f"{layer}.weight" in name for layer in SCALED_LAYERS):
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


@pytest.fixture
def run_all_verbs(cli, tiny_llama, tmp_path):
    """run_all_verbs(model): evaluate and gate a model; return the report of `sensitivity`."""

    def run(model, eight_bits=EIGHT_BITS):
        where = ("--model", model, "--data", str(tiny_llama / "heldout.txt"), "--device", "cpu")
        calibration = ("--calibration", str(tiny_llama / "calibration.txt"))
        few = (*calibration, "--calibration-segments", "2", "--calibration-length", "32")
        few = (*few, "--max-tokens", "189")

        ran = cli(
            "accuracy", *where, *few, "--json", "-", "--schemes", ",".join(eight_bits + OTHERS)
        )
        assert ran.code == ExitCode.PASS, ran.error
        records = [json.loads(line) for line in ran.out.splitlines()]
        kl = {r["scheme"]: r["value"] for r in records if r["metric"] == "kl_divergence"}
        assert kl.keys() == {*eight_bits, *OTHERS}
        assert 20 * max(kl[name] for name in eight_bits) < kl["w2a8"]

        ran = cli("sensitivity", *where, *few, "--bits", "w6a6", "--a8-budget", "0.25", "--json")
        assert ran.code == ExitCode.PASS, ran.error
        report = json.loads(ran.out)

        (tmp_path / "policy.toml").write_text(POLICY)
        policy = ("--policy", str(tmp_path / "policy.toml"))
        ran = cli("gate", "accuracy", *where, *policy, "--scheme", "flexq-w6ax")
        assert ran.code == ExitCode.PASS, ran.out + ran.error
        assert re.search(r"(\d+) of \1 layers", ran.out), ran.out
        return report

    return run


# Fused layers; test_every_family.py has the others.
FAST = ("Phi3ForCausalLM",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [*FAST, *(pytest.param(a, marks=pytest.mark.slow) for a in WHOLE_MODELS if a not in FAST)],
)
def test_odd_model_passes_all_verbs(odd_model, run_all_verbs, architecture):
    report = run_all_verbs(odd_model(architecture))

    assert len(report["sites"]) == LAYER_COUNTS.get(architecture, 14)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES | PARTLY_DENSE)
def test_family_passes_all_verbs(cli, family, run_all_verbs, tiny_llama, tmp_path, architecture):
    model, out = str(family(architecture)[1]), str(tmp_path / "out")
    data = ("--data", str(tiny_llama / "heldout.txt"), "--device", "cpu")
    eight_bits = (*EIGHT_BITS, "smoothquant-w8a8[alpha=none]")
    if architecture == "FalconForCausalLM":  # gives no attention maps
        eight_bits = tuple(name for name in eight_bits if not name.startswith("abq"))
        calibration = ("--calibration", str(tiny_llama / "calibration.txt"))
        calibration = (*calibration, "--calibration-segments", "2")
        abq = ("--schemes", "abq-w8a8[epochs=1]")
        ran = cli("accuracy", "--model", model, *data, *calibration, *abq)
        assert ran.code == ExitCode.USAGE
        assert "take omniquant" in ran.error

    report = run_all_verbs(model, eight_bits)

    is_uniform = architecture in FAMILIES
    layers = 2 * FAMILIES[architecture][1] if is_uniform else PARTLY_DENSE[architecture][1]
    assert len(report["sites"]) == layers
    kinds = [result["kind"] for result in report["kinds"]]
    assert ("experts" in kinds) == (architecture in {*MIXTURES, *PARTLY_DENSE})
    assert kinds[-1] == "all"
    assert cli("quantize", model, "--scheme", "flexq-w6ax", "--out", out).code == ExitCode.PASS
    policy = ("--policy", str(tmp_path / "policy.toml"))
    ran = cli("gate", "accuracy", "--reference", model, "--model", out, *data, *policy)
    assert ran.code == ExitCode.PASS, ran.out + ran.error
