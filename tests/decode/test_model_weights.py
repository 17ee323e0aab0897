"""Models on disk: their weights, and errors for unsupported configurations."""

from __future__ import annotations

import json

import pytest
import torch
from decoders import small_llama, small_opt
from transformers import CONFIG_MAPPING, MistralConfig

from flexq_bench.decode.architecture import of_config
from flexq_bench.decode.case import open_model
from flexq_bench.decode.loading import footprint, linear_kernel, packed_bytes
from flexq_bench.decode.model_weights import open_weights
from flexq_bench.decode.operations import check_capacity
from flexq_bench.errors import UsageError
from flexq_bench.workloads.blocks import DECODED

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """A LLaMA in several files."""
    small_llama(CPU).reference.save_pretrained(tmp_path, max_shard_size="200KB")
    return tmp_path


@pytest.mark.parametrize("build", [small_llama, small_opt])
def test_folder_has_the_saved_weights(tmp_path, build):
    small = build(CPU)
    small.reference.save_pretrained(tmp_path, max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    source = open_weights(tmp_path)

    got, wanted = source.block(1, CPU).linears, small.source.block(1, CPU).linears
    assert got.keys() == wanted.keys()
    for name, part in wanted.items():
        assert torch.equal(got[name].weight.values, part.weight.values)
    assert torch.equal(source.ends(CPU).head, small.source.ends(CPU).head)


def change_config(folder, **values):
    """Change the configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["GPT2"]}, "is a GPT2, and decode has LlamaForCausalLM, "),
        ({"architectures": "LlamaForCausalLM", "model_type": "gpt2"}, "model of type 'gpt2'"),
        ({"model_type": "mistral"}, "LlamaForCausalLM and the model type 'mistral'"),
        ({"hidden_size": None}, "hidden_size is a number of 1 or more, got None"),
        ({"num_attention_heads": 0}, "num_attention_heads is a number of 1 or more, got 0"),
        ({"rms_norm_eps": "NaN"}, "rms_norm_eps is a number above 0, got 'NaN'"),
        ({"rope_parameters": [1]}, "rotary angles are a table"),
        ({"head_dim": 31}, "a head has 31"),
        ({"intermediate_size": 256}, r"gate_proj.weight is \[384, 192\], .* \[256, 192\]"),
        ({"num_hidden_layers": 10**9}, "has 21 weights, .* asks for 1000000000 blocks"),
        ({"attention_bias": True}, r"lacks 8 weights .*model\.layers\.0\.self_attn\.k_proj\.bias"),
    ],
)
def test_inconsistent_configuration_is_refused(folder, values, message):
    change_config(folder, **values)

    with pytest.raises(UsageError, match=message):
        open_weights(folder)


def test_model_without_class_has_that_of_its_type(folder):
    change_config(folder, architectures=None)

    assert open_weights(folder).architecture.block == "llama"


@pytest.fixture(scope="module")
def config():
    """The configuration of a small LLaMA with 6 heads of 32 channels."""
    return small_llama(CPU).reference.config.to_dict()


@pytest.mark.parametrize(
    ("changes", "heads", "kv_heads", "head_dim"),
    [
        ({"num_key_value_heads": None, "head_dim": None}, 6, 6, 32),  # null is missing
        ({"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 64}, 5, 1, 64),
    ],
)
def test_heads_follow_the_configuration(config, changes, heads, kv_heads, head_dim):
    architecture = of_config({**config, **changes}, "a model")

    dimensions = architecture.dimensions
    assert (dimensions.heads, dimensions.kv_heads) == (heads, kv_heads)
    assert architecture.head_dim == dimensions.head_dim == head_dim


def test_missing_keys_have_the_defaults_of_transformers(config):
    given = config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    given |= {"num_attention_heads": 16, "head_dim": 16, "max_position_embeddings": 8192}
    for key in ("num_key_value_heads", "sliding_window"):
        given.pop(key, None)
    expected = MistralConfig(**given)

    dimensions = of_config(given, "a model").dimensions

    assert dimensions.kv_heads == expected.num_key_value_heads
    assert dimensions.context == expected.sliding_window


@pytest.mark.parametrize("block", [kind for kind in DECODED if kind != "opt"])
def test_missing_norm_and_rope_have_the_defaults_of_transformers(block):
    own = CONFIG_MAPPING[block]()
    given = own.to_dict() | {"architectures": None}
    for key in ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "hidden_act"):
        given.pop(key)

    architecture = of_config(given, "a model")

    assert architecture.eps == own.rms_norm_eps
    assert architecture.rope_theta == own.rope_parameters["rope_theta"]
    assert architecture.dimensions.tied_embeddings == own.tie_word_embeddings


def test_sliding_window_limits_the_context(folder):
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    change_config(folder, **mistral, sliding_window=64)
    assert open_weights(folder).architecture.dimensions.context == 64
    change_config(folder, sliding_window=None)
    assert open_weights(folder).architecture.dimensions.context == 256


def test_weights_beyond_fp16_are_refused(tmp_path):
    from safetensors.torch import save_file

    small = small_llama(CPU)
    small.reference.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    large = {name: (small.source.tensors[name].float() * 1e7).bfloat16()}
    save_file({**small.source.tensors, **large}, tmp_path / "model.safetensors")

    with pytest.raises(UsageError, match=r"down_proj\.weight holds NaN or infinity in FP16"):
        open_weights(tmp_path).block(0, CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_other_rotary_scaling_is_refused(config, changes):
    with pytest.raises(UsageError, match="scales its rotary angles by 'yarn'"):
        of_config({**config, "architectures": ["LlamaForCausalLM"], **changes}, "small")


def test_qwen3_without_head_dim_has_the_default():
    from transformers import Qwen3Config

    config = Qwen3Config(num_attention_heads=2, num_key_value_heads=1).to_dict()
    del config["head_dim"]

    assert of_config({**config, "architectures": ["Qwen3ForCausalLM"]}, "small").head_dim == 128


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(UsageError, match="context of 512 tokens, and prompt and answer make 515"):
        check_capacity(515, 512, "small")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama-13b", "no model 'lama-13b': there are llama-13b"),
        ("x" * 5000, "no model 'xxx"),
        *(
            (name, "and decode has llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, opt: measure")
            for name in ("gemma-3-4b", "phi-4", "deepseek-v2-lite")
        ),
    ],
)
def test_unknown_model_or_block_is_refused(name, message):
    with pytest.raises(UsageError, match=message):
        open_model(name, "fp16", 0)


def test_footprint_of_llama_13b_follows_its_formats():
    exact = footprint(open_model("llama-13b", "fp16", 0), 1, 1039, 16)
    six = footprint(open_model("llama-13b", "flexq-w6ax", 0), 1, 1039, 16)

    assert exact.weights == pytest.approx(26.03e9, rel=1e-3)
    assert six.weights == pytest.approx(10.37e9, rel=1e-3)
    assert (six.weights + six.cache) / (exact.weights + exact.cache) < 0.44
    assert exact.cache == 2 * 40 * 5120 * 2 * 1039


@pytest.mark.parametrize(
    "label",
    ["atom-w4a4", "dgq-w4a8", "dual-w6a8", "w8a16", "w4a16", "fp6-w6a16", "cublaslt-w8a8", "fp16"],
)
def test_layer_memory_equals_the_packed_bytes(label):
    n, k = 256, 1024
    kernel = linear_kernel(label, "cuda")
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    packed = kernel.pack_weight(kernel.quantize_weight(weight.half()))

    assert packed_bytes(n, k, kernel.spec.weight) == packed.nbytes
