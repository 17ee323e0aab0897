from __future__ import annotations

import pytest

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.family_files import read_family
from flexq_bench.workloads.models import get_model, load_catalog

# Parameters, in units of 10^9. LLaMA: arXiv:2302.13971, Table 2. Llama 2 and 3: tensor sizes of the
# checkpoints on the hub (Llama-2-*-hf, Meta-Llama-3-8B). Gemma 3: arXiv:2503.19786, Table 1, both
# columns. DeepSeek-V2-Lite: arXiv:2405.04434, appendix B.1. Mixtral 8x7B: arXiv:2401.04088,
# section 2. The others: what their model cards or names say.
PUBLISHED_BILLIONS = {
    "llama-7b": 6.7,
    "llama-13b": 13.0,
    "llama-30b": 32.5,
    "llama-65b": 65.2,
    "sheared-llama-1.3b": 1.345,
    "llama-2-7b": 6.738,
    "llama-2-13b": 13.016,
    "llama-2-70b": 68.977,
    "llama-3-8b": 8.030,
    "opt-125m": 0.125,
    "opt-1.3b": 1.3,
    "opt-2.7b": 2.65,
    "opt-6.7b": 6.7,
    "opt-13b": 13.0,
    "opt-30b": 30.0,
    "opt-66b": 66.0,
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.7,
    "qwen3-4b": 4.0,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.0,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 141.0,
    "gemma-3-1b": 0.302 + 0.698,
    "gemma-3-4b": 0.675 + 3.209,
    "gemma-3-12b": 1.012 + 10.759,
    "gemma-3-27b": 1.416 + 25.600,
    "phi-4": 14.7,
    "gpt-neox-20b": 20.6,
    "deepseek-v2-lite": 15.7,
    "llama-3.2-1b": 1.236,
    "smollm2-135m": 0.1345,
}
COUNTED = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b")  # in their checkpoints


def linear_parameters(spec, *, fused=True):
    """Weights of all linear layers of all blocks, without biases."""
    return sum(s.n * s.k * s.count for s in spec.linear_layers(fused))


def test_the_catalog_has_the_promised_models():
    assert set(load_catalog()) == set(PUBLISHED_BILLIONS)


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_parameters_agree_with_the_published_count(name):
    spec = get_model(name)

    total = (linear_parameters(spec) + spec.embedding_parameters) / 1e9

    closeness = {"abs": 0.002} if name in COUNTED else {"rel": 0.013}
    assert total == pytest.approx(PUBLISHED_BILLIONS[name], **closeness)
    assert linear_parameters(spec, fused=True) == linear_parameters(spec, fused=False)


def test_grouped_query_attention_narrows_k_and_v():
    spec = get_model("llama-2-70b")

    assert (spec.layer("k_proj").n, spec.layer("v_proj").n) == (1024, 1024)
    assert (spec.layer("qkv_proj").n, spec.layer("qkv_proj").k) == (10240, 8192)


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("llama-7b", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("opt-6.7b", ["qkv_proj", "out_proj", "fc1", "fc2"]),
        (
            "qwen3-30b-a3b",
            ["qkv_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"],
        ),
    ],
)
def test_fused_layers_are_in_forward_order(name, fused):
    assert [shape.name for shape in get_model(name).linear_layers()] == fused


def test_only_stacked_projections_are_marked_as_fused():
    layers = get_model("llama-7b").all_layers()

    assert [shape.name for shape in layers if shape.fused] == ["qkv_proj", "gate_up_proj"]


@pytest.mark.parametrize("spec", load_catalog().values(), ids=lambda spec: spec.name)
def test_every_model_names_its_source(spec):
    assert "arXiv:" in spec.source
    assert "config.json of " in spec.source


def test_an_unknown_model_is_reported_with_the_nearest_first():
    with pytest.raises(WorkloadError, match="no model 'llama-3-7b': there are llama-3-8b, "):
        get_model("llama-3-7b")


def test_an_unknown_layer_is_reported_with_the_nearest_first():
    with pytest.raises(WorkloadError, match="named 'gate_upproj': there are gate_up_proj, "):
        get_model("llama-7b").layer("gate_upproj")


def test_changing_the_returned_catalog_changes_no_other():
    load_catalog().clear()

    assert get_model("llama-7b").layers == 32


FAMILY = """
family = "tiny"
block = "llama"
tied_embeddings = false
learned_positions = false
source = "made up"
[[model]]
name = "tiny-1"
hidden = 64
ffn = 96
layers = 2
heads = 4
kv_heads = 2
vocab = 100
context = 16
source = "made up"
"""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("hidden = 64", "hiden = 64", "tiny-1: no key 'hiden' here: the keys are hidden, "),
        ("hidden = 64\n", "", "tiny-1: hidden is missing"),
        ("hidden = 64", "hidden = 0", "hidden must be an integer of at least 1, got 0"),
        ("hidden = 64", "hidden = true", "hidden must be an integer of at least 1, got True"),
        ("hidden = 64", "hidden = '64'", "hidden must be an integer of at least 1, got '64'"),
        ("heads = 4", "heads = 5", "5 heads must divide hidden 64"),
        ("kv_heads = 2", "kv_heads = 3", "3 KV heads must divide"),
        ('block = "llama"', 'block = "lama"', "block must be one of llama, opt, mistral, "),
        ('block = "llama"', 'block = "mixtral"', "tiny-1: a block mixtral needs experts"),
        ('block = "llama"', 'block = "deepseek_v2"', "a block deepseek_v2 needs latent"),
        ("context = 16", "context = 16\nexperts = { count = 0 }", "experts: count must be an"),
        ("tied_embeddings = false", "tied_embeddings = 0", "must be true or false, got 0"),
    ],
)
def test_a_family_file_with_a_slip_is_refused(tmp_path, old, new, complaint):
    path = tmp_path / "tiny.toml"
    path.write_text(FAMILY.replace(old, new, 1))

    with pytest.raises(WorkloadError) as caught:
        read_family(path)

    assert complaint in str(caught.value)


def test_name_in_upper_case_is_the_catalog_model():
    assert get_model("Qwen3-0.6B") == get_model("qwen3-0.6b")


def test_unknown_model_is_pointed_to_its_configuration():
    with pytest.raises(WorkloadError, match=r"sweep --config PATH"):
        get_model("no-such-model")
