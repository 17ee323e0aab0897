from __future__ import annotations

import pytest
import torch
from families import ARCHITECTURES, tiny_config
from torch import nn

from flexq_bench.checkpoints.streaming import model_on_meta
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.linear_layers import with_linear_layers
from flexq_bench.schemes.model_map import linear_at, map_model
from flexq_bench.schemes.registry import resolve
from flexq_bench.schemes.smoothing import fold


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sites_are_exactly_the_linear_layers_of_blocks(architecture, build):
    model = build(architecture)
    layout = map_model(model)

    found = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(layout.path + ".")
        and not name.endswith("_gate")  # a router
    }

    assert {site.name: (site.n, site.k) for site in layout.sites} == found


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_folded_scales_leave_what_the_model_computes(architecture, build):
    model = build(architecture)
    layout = map_model(model)
    ids = torch.arange(12)[None]
    before = model(ids).logits
    for block in range(layout.blocks):
        module = layout.block_module(model, block)
        for site_input in layout.scalable_inputs(block):
            source = module.get_submodule(site_input.source)
            sites = [site for site in layout.of_block(block) if site.kind in site_input.kinds]
            readers = [linear_at(model, site.name) for site in sites]
            scale = torch.linspace(0.5, 2, source.weight.shape[0])
            fold(source, readers, site_input, scale)

    torch.testing.assert_close(model(ids).logits, before, rtol=1e-3, atol=1e-3)


def test_conv1d_layers_become_linear_ones_of_the_same_function():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 16, "resid_pdrop": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    ids = torch.arange(12)[None]
    before = model(ids).logits
    with pytest.raises(QuantizeError, match="is a Conv1D"):
        map_model(model)

    torch.testing.assert_close(with_linear_layers(model)(ids).logits, before)
    assert [site.kind for site in map_model(model).sites] == [
        "c_attn", "attn.c_proj", "c_fc", "mlp.c_proj",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "feed_forward"),
    [
        ({}, "input_layernorm"),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, "ln_mlp"),
        ({"parallel_attn": False}, "post_attention_layernorm"),
    ],
)
def test_falcon_feed_forward_reads_the_norm_of_its_variant(build, changes, feed_forward):
    layout = map_model(build("FalconForCausalLM", **changes))
    (source,) = [i.source for i in layout.inputs_of(0) if "dense_h_to_4h" in i.kinds]
    assert source == feed_forward


def test_a_model_that_is_quantized_already_is_refused(tiny_llama):
    model = tiny_llama()
    resolve("w6a6").quantize(model)

    with pytest.raises(QuantizeError, match="quantized already"):
        resolve("w4a4").quantize(model)


def test_every_site_has_one_feed(tiny_llama, tiny_opt):
    for model in (tiny_llama(), tiny_opt(), tiny_opt(do_layer_norm_before=False)):
        layout = map_model(model)
        for block in range(layout.blocks):
            kinds = [kind for site_input in layout.inputs_of(block) for kind in site_input.kinds]
            assert sorted(kinds) == sorted(site.kind for site in layout.of_block(block))


def test_opt_350m_norms_pass_no_scale(tiny_opt):
    scalable = map_model(tiny_opt(do_layer_norm_before=False)).scalable_inputs(0)

    assert [site_input.source for site_input in scalable] == ["self_attn.v_proj", "fc1"]


def test_identity_experts_return_their_input():
    experts = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleList([experts.LongcatFlashExperts(tiny_config("longcat_flash"))])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    count = len(model[0].gate_up_proj)
    assert len(model[0].down_proj) < count
    x = torch.randn(6, 64, generator=generator)
    chosen = torch.arange(12).view(6, 2) % count
    shares = torch.rand(6, 2, generator=generator)
    expected = model[0](x, chosen, shares)

    separate = with_linear_layers(model)[0]

    torch.testing.assert_close(separate(x, chosen, shares), expected)


def test_blocks_that_share_weights_are_refused_without_weights_too():
    model = model_on_meta(tiny_config("zamba2"))
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(torch.empty_like(parameter)))

    with pytest.raises(QuantizeError, match="blocks 1 and 2 of Zamba2ForCausalLM share weights"):
        map_model(model)
