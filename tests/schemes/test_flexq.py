"""FlexQ's fake quantization against the paper's equations and against our kernels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flexq_bench.kernels import registry as kernel_registry
from flexq_bench.kernels.formats import FP16, NumberFormat, quantize
from flexq_bench.schemes.activations import DynamicActivation
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.model_map import linear_at, map_model
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.registry import resolve

GROUP = 128


def by_the_paper(matrix, bits):
    """Round to nearest in groups of 128 (FlexQ, section 3.1), value by value in float64."""
    top = 2 ** (bits - 1) - 1
    rounded = np.zeros(matrix.shape)
    for row, values in enumerate(matrix):
        for start in range(0, len(values), GROUP):
            group = values[start : start + GROUP]
            scale = float(np.float16(max(abs(value) for value in group) / top))
            for place, value in enumerate(group, start=start):
                code = 0 if scale == 0 else max(-top - 1, min(top, round(value / scale)))
                rounded[row, place] = code * scale
    return rounded


def random_operands(m, n, k, seed):
    """X [m, k] in FP16 with outliers and a token of zeros; W [n, k] with a group of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) ** 3
    x[:, :: k // 5] *= 50
    x[m - 1] = 0
    w = torch.randn(n, k, generator=generator)
    w[0, :GROUP] = 0
    return x.half(), w


@pytest.mark.parametrize("a_bits", [6, 8])
@pytest.mark.parametrize("k", [64, 128, 300, 576])
def test_weights_and_inputs_are_the_papers_to_the_bit(a_bits, k):
    x, w = random_operands(5, 7, k, seed=k)

    weight = NumberFormat(6, GROUP).round(w)
    inputs = DynamicActivation(NumberFormat(a_bits, GROUP))(x)

    assert np.array_equal(weight.double().numpy(), by_the_paper(w.double().numpy(), 6))
    assert np.array_equal(inputs.double().numpy(), by_the_paper(x.double().numpy(), a_bits))


@pytest.mark.parametrize("a_bits", [6, 8])
@pytest.mark.parametrize("k", [300, 576])
def test_a_layer_computes_what_the_kernel_computes(a_bits, k):
    x, w = random_operands(5, 16, k, seed=k + 1)
    bias = torch.randn(16, generator=torch.Generator().manual_seed(2)).half()
    kernel = kernel_registry.resolve(f"flexq-w6a{a_bits}", "cpu")
    expected = torch.empty(5, 16, dtype=torch.float16)
    kernel.gemm(
        kernel.pack_activation(kernel.quantize_activation(x)),
        kernel.pack_weight(kernel.quantize_weight(w)),
        expected,
        bias=bias,
    )
    activation = DynamicActivation(NumberFormat(a_bits, GROUP))
    layer = FakeQuantizedLinear(
        "layer", QuantizedLayer(quantize(w, NumberFormat(6, GROUP)), activation, bias)
    )

    found = layer(x)

    assert torch.equal(layer.weight.double(), kernel.quantize_weight(w).dequantize())
    # The sums differ in their order of FP32 additions: one step of FP16 at most.
    assert torch.allclose(found, expected, rtol=2**-10, atol=2**-10 * float(expected.abs().max()))


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
    """Activation bits of each site, by kind."""
    return {
        site.kind: model.get_submodule(site.name).activation.format.bits
        for site in map_sites(model)
    }


def map_sites(model):
    return [
        site
        for site in _LAYOUTS[type(model).__name__].sites
        if hasattr(model.get_submodule(site.name), "activation")
    ]


_LAYOUTS = {}


@pytest.fixture(autouse=True)
def _layouts(tiny_llama, tiny_opt):
    for build in (tiny_llama, tiny_opt):
        model = build()
        _LAYOUTS[type(model).__name__] = map_model(model)


def test_down_proj_of_gated_models_has_eight_bits(tiny_llama):
    model = tiny_llama()

    resolve("flexq-w6ax").quantize(model)

    bits = a_bits_of(model)
    assert bits.pop("down_proj") == 8
    assert set(bits.values()) == {6}


def test_opt_has_six_bits_throughout(tiny_opt):
    model = tiny_opt()

    resolve("flexq-w6ax").quantize(model)

    assert set(a_bits_of(model).values()) == {6}


def test_kinds_with_eight_bits_can_be_named(tiny_llama):
    model = tiny_llama()

    resolve("flexq-w6ax[a8=v_proj+o_proj]").quantize(model)

    assert {kind for kind, bits in a_bits_of(model).items() if bits == 8} == {"v_proj", "o_proj"}


def test_layers_are_rounded_but_not_head_and_embeddings(tiny_llama):
    model, dense = tiny_llama(), tiny_llama()

    resolve("flexq-w6ax").quantize(model)

    for site in _LAYOUTS["LlamaForCausalLM"].sites:
        weight = linear_at(dense, site.name).weight
        expected = torch.from_numpy(by_the_paper(weight.detach().double().numpy(), 6))
        assert torch.equal(model.get_submodule(site.name).weight.double(), expected)
    assert torch.equal(model.lm_head.weight, dense.lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, dense.model.embed_tokens.weight)


def test_a_budget_gives_eight_bits_to_that_share_of_layers(tiny_llama, calibration):
    model = tiny_llama()

    resolve("flexq-w6ax[a8_budget=0.25,a8_cost=matrices]").quantize(model, calibration)

    high = [
        site
        for site in _LAYOUTS["LlamaForCausalLM"].sites
        if model.get_submodule(site.name).activation.format.bits == 8
    ]
    assert len(high) == 3  # of 14


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flexq-w6ax[a8_budget=1.5]", "0 to 1"),
        ("flexq-w6ax[a8_budget=0.5,a8=fc2]", "give one"),
        ("flexq-w6ax[a8_budget=0.5,a8_cost=money]", "no cost named 'money'"),
    ],
)
def test_options_that_contradict_are_refused(name, words):
    with pytest.raises(QuantizeError, match=words):
        resolve(name)


def test_layers_that_the_model_lacks_are_refused(tiny_llama):
    with pytest.raises(QuantizeError, match="no layer 'fc2'"):
        resolve("flexq-w6ax[a8=fc2]").quantize(tiny_llama())


def test_a_budget_without_calibration_data_is_refused(tiny_llama):
    with pytest.raises(QuantizeError, match="--calibration"):
        resolve("flexq-w6ax[a8_budget=0.25]").quantize(tiny_llama())
