"""Keys and tensors of GGUF files that transformers passes over: computed, or refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers

from flexq_bench.accuracy.loading import load_model
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.decode.model_weights import open_weights
from flexq_bench.errors import UsageError
from flexq_bench.schemes.model_files import find_model

gguf = pytest.importorskip("gguf", reason="GGUF files need flexq-bench[accuracy]")
CPU = torch.device("cpu")
VOCABULARY, CONTEXT, HEAD_DIM = 520, 128, 16
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "head_dim": HEAD_DIM,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
IDS = (torch.arange(3, 3 + CONTEXT) * 7 % VOCABULARY).view(1, CONTEXT)


def a_model(kind, settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases are drawn as 0, norms as 1
            parameter.data += torch.randn_like(parameter) / 8
        elif "proj" in name:
            parameter.data *= 4
    return model


def interleaved(weight, heads):
    # llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute: pairs of channels side by side.
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def a_file(gguf_writer, tmp_path):
    """a_file(architecture, model): the model in FP32; keys and tensors: more of them."""

    def build(architecture, model, keys=None, tensors=None):
        config, path = model.config, tmp_path / "model.gguf"
        with gguf_writer(path, architecture, config, VOCABULARY) as writer:
            writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
            given = {"rope.dimension_count": HEAD_DIM, "attention.key_length": HEAD_DIM}
            for key, value in (given | (keys or {})).items():
                add = {str: writer.add_string, int: writer.add_uint32}.get(
                    type(value), writer.add_float32
                )
                add(f"{architecture}.{key}", value)
            kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
            names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
            for name, tensor in model.state_dict().items():
                module, _, part = name.rpartition(".")
                values = tensor.numpy()
                if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
                    values = interleaved(values, values.shape[0] // HEAD_DIM)
                writer.add_tensor(f"{names.get_name(module)}.{part}", np.ascontiguousarray(values))
            for name, values in (tensors or {}).items():
                writer.add_tensor(name, np.asarray(values, np.float32))
        return path

    return build


def llama3_factors(factor):
    # llama.cpp, convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors
    factors = []
    for channel in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * 10000 ** (channel / HEAD_DIM)
        smooth = (8192 / wavelength - 1) / (4 - 1)
        blended = 1 / ((1 - smooth) / factor + smooth)
        is_short, is_long = wavelength < 8192 / 4, wavelength > 8192
        factors.append(1 if is_short else factor if is_long else blended)
    return factors


def scaled(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA3 = scaled(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
COMPUTED = {
    "biases": ("llama", "Llama", {"attention_bias": True, "mlp_bias": True}, {}, {}),
    "linear": ("llama", "Llama", scaled("linear", factor=4.0), LINEAR, {}),
    "llama3": ("llama", "Llama", LLAMA3, {}, {"rope_freqs.weight": llama3_factors(8.0)}),
    "yarn": (
        "qwen2",
        "Qwen2",
        scaled("yarn", factor=4.0, original_max_position_embeddings=32),
        YARN,
        {},
    ),
    "heads": ("qwen3", "Qwen3", {}, {"attention.value_length": HEAD_DIM}, {}),
    "none": ("llama", "Llama", {}, {"rope.scaling.type": "none"}, {"rope_freqs.weight": [1] * 8}),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_gguf_file_equals_its_original_model(a_file, case):
    architecture, kind, settings, keys, tensors = COMPUTED[case]
    model = a_model(kind, settings)
    loaded = load_model(str(a_file(architecture, model, keys, tensors)), device=CPU)
    with torch.inference_mode():
        assert torch.equal(loaded.model(IDS).logits, model(IDS).logits)


def test_decode_uses_biases_and_scaled_angles_of_gguf(a_file):
    model = a_model("Llama", {**LLAMA3, "attention_bias": True})
    path = a_file("llama", model, tensors={"rope_freqs.weight": llama3_factors(8.0)})

    weights = open_weights(path)

    assert dict(weights.architecture.rope_scaling)["factor"] == 8
    bias = weights.block(0, CPU).linears["qkv_proj"].bias
    assert torch.equal(bias[:64], model.model.layers[0].self_attn.q_proj.bias.half())


REFUSED = [
    ({"rope.scaling.type": "longrope"}, {}, r"has llama.rope.scaling.type 'longrope', which trans"),
    ({**YARN, "rope.scaling.attn_factor": 2.0}, {}, "rope.scaling.type 'yarn'"),
    ({"attention.sliding_window": 16}, {}, "llama.attention.sliding_window 16"),
    ({"rope.dimension_count": 8, "attention.key_length": 16}, {}, "llama.rope.dimension_count 8"),
    ({"attention.value_length": 8}, {}, "llama.attention.value_length 8"),
    ({"logit_scale": 0.5}, {}, r"llama.logit_scale 0.5"),
    ({"final_logit_softcapping": 30.0}, {}, "llama.final_logit_softcapping 30"),
    ({}, {"rope_freqs.weight": np.linspace(1, 8, 8)}, "rope_freqs.weight other than Llama 3's"),
    ({}, {"blk.0.attn_gate.weight": np.ones((64, 64))}, r"has 1 tensors .*blk.0.attn_gate.weight"),
]


@pytest.mark.parametrize(("keys", "tensors", "message"), REFUSED)
def test_unsupported_gguf_keys_are_refused_in_one_line(a_file, keys, tensors, message):
    path = a_file("llama", a_model("Llama", {}), keys, tensors)
    for load in (lambda: load_model(str(path), device=CPU), lambda: open_weights(path)):
        with pytest.raises(UsageError, match=message) as raised:
            load()
        assert "\n" not in str(raised.value)


def test_gemma_query_scale_equals_that_of_llama_cpp(a_file):
    settings = {"tie_word_embeddings": False, "query_pre_attn_scalar": HEAD_DIM}
    keys = {"attn_logit_softcapping": 20.0, "attention.sliding_window": 32}
    path = a_file("gemma2", a_model("Gemma2", settings), keys)
    config = open_source(find_model(str(path))).config()
    given = config.query_pre_attn_scalar, config.attn_logit_softcapping, config.sliding_window
    assert given == (HEAD_DIM, 20, 32)
