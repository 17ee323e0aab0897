"""FlexQ's layers, and those with 8-bit activations."""

from __future__ import annotations

import math

import pytest
import torch

from flexq_bench.kernels.formats import FP16, NumberFormat, quantize
from flexq_bench.schemes.activations import DynamicActivation
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.model_map import linear_at, map_model
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.registry import resolve

GROUP = 128


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (math.nan, "NaN or infinity"),
        (math.inf, "NaN or infinity"),
        (1e6, r"inputs reach 1e\+06, kernels take FP16 up to 65,504"),
    ],
)
def test_inputs_beyond_fp16_are_refused_with_the_layer(bad, reason):
    layer = FakeQuantizedLinear(
        "model.layers.3.fc2",
        QuantizedLayer(quantize(torch.ones(2, 4), FP16), DynamicActivation(NumberFormat(6))),
    )
    x = torch.zeros(1, 4)
    x[0, 1] = bad

    with pytest.raises(QuantizeError, match=rf"model\.layers\.3\.fc2: .*{reason}"):
        layer(x)


def a_bits_of(model):
    """Activation bits of each quantized layer, by name."""
    return {
        name: module.activation.format.bits
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear)
    }


@pytest.mark.parametrize(
    ("name", "family", "high"),
    [
        ("flexq-w6ax", "tiny_llama", {"down_proj"}),
        ("flexq-w6ax", "tiny_opt", set()),
        ("flexq-w6ax[a8=v_proj+o_proj]", "tiny_llama", {"v_proj", "o_proj"}),
    ],
)
def test_sensitive_kinds_have_eight_bits(name, family, high, request):
    model = request.getfixturevalue(family)()

    resolve(name).quantize(model)

    for layer, bits in a_bits_of(model).items():
        assert bits == (8 if layer.rpartition(".")[2] in high else 6)


def test_layers_are_rounded_but_not_head_and_embeddings(tiny_llama):
    model, dense = tiny_llama(), tiny_llama()

    resolve("flexq-w6ax").quantize(model)

    for site in map_model(dense).sites:
        expected = quantize(linear_at(dense, site.name).weight.detach(), NumberFormat(6, GROUP))
        assert torch.equal(model.get_submodule(site.name).weight.double(), expected.dequantize())
    assert torch.equal(model.lm_head.weight, dense.lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, dense.model.embed_tokens.weight)


def test_budget_gives_eight_bits_to_a_share_of_layers(tiny_llama, calibration):
    model = tiny_llama()

    resolve("flexq-w6ax[a8_budget=0.25,a8_cost=matrices]").quantize(model, calibration)

    assert [*a_bits_of(model).values()].count(8) == 3  # of 14


def test_layers_that_the_model_lacks_are_refused(tiny_llama):
    with pytest.raises(QuantizeError, match="no layer 'fc2'"):
        resolve("flexq-w6ax[a8=fc2]").quantize(tiny_llama())
