"""Fake-quantized layers, names of schemes, calibration data and what a block sees of them."""

from __future__ import annotations

import pytest
import torch
from families import ARCHITECTURES

import flexq_bench.schemes
from flexq_bench.kernels.formats import NumberFormat, quantize, quantize_mixed
from flexq_bench.schemes import registry
from flexq_bench.schemes.activations import StaticActivation
from flexq_bench.schemes.calibration import BlockStream, Statistics, calibration_segments
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.uniform import UniformOptions


def test_quantized_layer_stays_fp32_when_model_becomes_fp16():
    weight = quantize(torch.randn(4, 256), NumberFormat(6, 128))
    layer = FakeQuantizedLinear("layer", QuantizedLayer(weight))

    layer.to(torch.float16)

    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight.double(), weight.dequantize())
    assert layer.layer.weight.scales.dtype == torch.float16
    assert layer(torch.ones(2, 3, 256, dtype=torch.float16)).dtype == torch.float16


def test_codes_follow_a_layer_to_its_device():
    weight = quantize_mixed(torch.randn(4, 256))
    layer = FakeQuantizedLinear("layer", QuantizedLayer(weight, None, torch.ones(4).half()))

    layer.to("meta")

    moved = layer.layer
    tensors = (moved.weight.values, moved.weight.scales, moved.weight.order, moved.bias)
    assert {tensor.device.type for tensor in (*tensors, layer.weight, layer.order)} == {"meta"}


def test_weights_beyond_fp16_are_refused_with_the_layer(tiny_opt):
    model = tiny_opt()
    model.model.decoder.layers[1].fc1.bias.data[0] = 1e6

    with pytest.raises(QuantizeError, match=r"layers\.1\.fc1: its bias .* FP16"):
        registry.resolve("w6a6").quantize(model)


def test_static_scale_saturates_beyond_calibration():
    static = StaticActivation(NumberFormat(8), scale=0.5)

    assert static(torch.tensor([[1.1, -1000.0]])).tolist() == [[1.0, -64.0]]


def test_every_example_is_a_scheme_with_its_own_name():
    assert [registry.resolve(name).name for name in registry.names()] == list(registry.names())
    assert all(named.scheme.source and named.summary for named in registry.named_schemes())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("w6a8", UniformOptions(6, 8, 128)),
        ("rtn-w4a16", UniformOptions(4, 16, None)),
        ("w6a6[group=none]", UniformOptions(6, 6, None)),
        ("w6a6[ group = 64 ]", UniformOptions(6, 6, 64)),
    ],
)
def test_name_determines_bits_and_options(name, options):
    assert registry.resolve(name).options == options


def test_segments_are_pieces_of_the_text_each_once():
    tokens = torch.arange(1000)

    found = calibration_segments(tokens, segments=10, length=64, seed=3)

    starts = [int(segment[0]) for segment in found.tokens]
    assert len(set(starts)) == 10
    assert all(torch.equal(s, torch.arange(int(s[0]), int(s[0]) + 64)) for s in found.tokens)
    again = calibration_segments(tokens, segments=10, length=64, seed=3)
    assert torch.equal(again.tokens, found.tokens)


def test_too_short_calibration_text_is_refused():
    with pytest.raises(QuantizeError, match="needs 3 segments of 64 tokens, the text has 130"):
        calibration_segments(torch.arange(130), segments=3, length=64)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("at_once", [1, 3])
def test_blocks_see_what_the_whole_model_computes(architecture, at_once, calibration, build):
    model = build(architecture)
    layout = map_model(model)
    with torch.no_grad():
        expected = model(calibration.tokens, output_hidden_states=True).hidden_states
    stream = BlockStream(model, layout, calibration, at_once=at_once)

    for block in range(layout.blocks):
        torch.testing.assert_close(
            torch.cat(list(stream.inputs)), expected[block], rtol=1e-4, atol=1e-4
        )
        if block + 1 < layout.blocks:
            stream.advance()


def test_statistics_are_those_of_all_rows(tiny_llama, calibration):
    model = tiny_llama()
    layout = map_model(model)
    stream, statistics = BlockStream(model, layout, calibration), Statistics(hessian=True)
    seen = []
    name = layout.sites[0].name
    model.get_submodule(name).register_forward_pre_hook(
        lambda module, arguments: seen.append(arguments[0].detach())
    )

    stream.observe(statistics)

    rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen]).double()
    assert statistics.count[name] == calibration.tokens.numel()
    assert torch.equal(statistics.absmax[name].double(), rows.abs().amax(dim=0))
    assert torch.allclose(statistics.hessian[name], rows.T @ rows)
    assert torch.allclose(statistics.square_sum[name], rows.square().sum(dim=0))


def test_exported_names_exist():
    assert all(hasattr(flexq_bench.schemes, name) for name in flexq_bench.schemes.__all__)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        flexq_bench.schemes.missing  # noqa: B018
