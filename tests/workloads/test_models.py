from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from workloads.errors import WorkloadError
from workloads.family_files import read_family
from workloads.model_spec import ModelSpec
from workloads.models import get_model, load_catalog

# Parameters, in units of 10^9. LLaMA: arXiv:2302.13971, Table 2. The others: tensor sizes of the
# checkpoints on the hub (Llama-2-*-hf, Meta-Llama-3-8B) and the names of the OPT models.
PUBLISHED_BILLIONS = {
    "llama-7b": 6.7,
    "llama-13b": 13.0,
    "llama-30b": 32.5,
    "llama-65b": 65.2,
    "llama-2-7b": 6.738,
    "llama-2-13b": 13.016,
    "llama-2-70b": 68.977,
    "llama-3-8b": 8.030,
    "opt-6.7b": 6.7,
    "opt-13b": 13.0,
    "opt-30b": 30.0,
}


def built_layers(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """[N,K] of each linear layer in one block, as transformers builds the architecture."""
    with torch.device("meta"):
        if spec.block == "opt":
            model: torch.nn.Module = OPTForCausalLM(
                OPTConfig(
                    hidden_size=spec.hidden,
                    word_embed_proj_dim=spec.hidden,
                    ffn_dim=spec.ffn,
                    num_hidden_layers=1,
                    num_attention_heads=spec.heads,
                )
            )
        else:
            model = LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=spec.hidden,
                    intermediate_size=spec.ffn,
                    num_hidden_layers=1,
                    num_attention_heads=spec.heads,
                    num_key_value_heads=spec.kv_heads,
                )
            )
    return {
        name.rsplit(".", 1)[-1]: (layer.out_features, layer.in_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and "layers.0" in name
    }


def linear_parameters(spec: ModelSpec) -> int:
    """Weights of all linear layers of all blocks, without biases."""
    return spec.layers * sum(s.n * s.k * s.count_per_block for s in spec.linear_layers())


def test_the_catalog_has_the_promised_models() -> None:
    assert set(load_catalog()) == set(PUBLISHED_BILLIONS)


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_parameters_agree_with_the_published_count(name: str) -> None:
    spec = get_model(name)

    total = (linear_parameters(spec) + spec.embedding_parameters) / 1e9

    assert total == pytest.approx(PUBLISHED_BILLIONS[name], rel=0.012)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b"])
def test_parameters_agree_closely_where_the_checkpoint_was_counted(name: str) -> None:
    spec = get_model(name)

    total = (linear_parameters(spec) + spec.embedding_parameters) / 1e9

    assert total == pytest.approx(PUBLISHED_BILLIONS[name], abs=0.002)


@pytest.mark.parametrize("name", ["llama-7b", "llama-30b", "llama-2-70b", "llama-3-8b", "opt-30b"])
def test_separate_layers_are_those_of_the_real_architecture(name: str) -> None:
    spec = get_model(name)

    ours = {shape.name: (shape.n, shape.k) for shape in spec.linear_layers(fused=False)}

    assert ours == built_layers(spec)


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_fusing_changes_no_weight(name: str) -> None:
    spec = get_model(name)

    def weights(fused: bool) -> int:
        return sum(s.n * s.k * s.count_per_block for s in spec.linear_layers(fused))

    assert weights(fused=True) == weights(fused=False)


def test_grouped_query_attention_narrows_k_and_v() -> None:
    spec = get_model("llama-2-70b")

    assert (spec.layer("k_proj").n, spec.layer("v_proj").n) == (1024, 1024)
    assert (spec.layer("qkv_proj").n, spec.layer("qkv_proj").k) == (10240, 8192)


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("llama-7b", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("opt-6.7b", ["qkv_proj", "out_proj", "fc1", "fc2"]),
    ],
)
def test_fused_layers_come_in_the_order_of_the_forward_pass(name: str, fused: list[str]) -> None:
    assert [shape.name for shape in get_model(name).linear_layers()] == fused


def test_only_stacked_projections_are_marked_as_fused() -> None:
    layers = get_model("llama-7b").all_layers()

    assert [shape.name for shape in layers if shape.fused] == ["qkv_proj", "gate_up_proj"]


@pytest.mark.parametrize("spec", load_catalog().values(), ids=lambda spec: spec.name)
def test_every_model_names_its_source(spec: ModelSpec) -> None:
    assert "arXiv:" in spec.source
    assert "config.json of " in spec.source


def test_an_unknown_model_is_reported_with_the_nearest_first() -> None:
    with pytest.raises(WorkloadError, match="no model 'llama-3-7b': there are llama-3-8b, "):
        get_model("llama-3-7b")


def test_an_unknown_layer_is_reported_with_the_nearest_first() -> None:
    with pytest.raises(WorkloadError, match="named 'gate_upproj': there are gate_up_proj, "):
        get_model("llama-7b").layer("gate_upproj")


def test_changing_the_returned_catalog_changes_no_other() -> None:
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
        ('block = "llama"', 'block = "lama"', "block must be llama or opt, got 'lama'"),
        ("tied_embeddings = false", "tied_embeddings = 0", "must be true or false, got 0"),
    ],
)
def test_a_family_file_with_a_slip_is_refused(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(FAMILY.replace(old, new, 1))

    with pytest.raises(WorkloadError) as caught:
        read_family(path)

    assert complaint in str(caught.value)
