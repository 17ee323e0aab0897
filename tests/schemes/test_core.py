"""Fake-quantized layers, names of schemes, calibration data and what a block sees of them."""

from __future__ import annotations

import pytest
import torch

import flexq_bench.accuracy
import flexq_bench.schemes
from flexq_bench.schemes import registry
from flexq_bench.schemes.activations import DynamicActivation, MixedActivation, StaticActivation
from flexq_bench.schemes.calibration import BlockStream, Statistics, calibration_segments
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.model_map import ARCHITECTURES, map_model
from flexq_bench.schemes.uniform import UniformOptions
from kernels.errors import ShapeError
from kernels.formats import NumberFormat


def test_a_layer_keeps_its_weights_in_fp32_when_the_model_becomes_fp16():
    weight = NumberFormat(6, 128).round(torch.randn(4, 256))
    layer = FakeQuantizedLinear("layer", weight)

    layer.to(torch.float16)

    assert torch.equal(layer.weight, weight)
    assert layer(torch.ones(2, 3, 256, dtype=torch.float16)).dtype == torch.float16


def test_scale_comes_before_order_and_output_is_rounded():
    weight = torch.tensor([[1.0, 10.0], [0.0, 1.0]])
    layer = FakeQuantizedLinear(
        "layer",
        weight,
        torch.tensor([0.5, 0.0]),
        input_scale=torch.tensor([2.0, 3.0]),
        order=torch.tensor([1, 0]),
        output=DynamicActivation(NumberFormat(2)),
    )

    # x·s = [2, 3], in order [3, 2]: 3 + 20 + 0.5 = 23.5 and 2, of which 2 bits leave 1 and 0
    assert layer(torch.ones(1, 2)).tolist() == [[23.5, 0.0]]


def test_a_layer_refuses_what_does_not_fit():
    with pytest.raises(ShapeError, match=r"layer: input_scale must be \[3\], got \[2\]"):
        FakeQuantizedLinear("layer", torch.ones(2, 3), input_scale=torch.ones(2))


def test_a_static_scale_saturates_what_calibration_never_saw():
    static = StaticActivation(NumberFormat(8), scale=0.5)

    assert static(torch.tensor([[1.1, -1000.0]])).tolist() == [[1.0, -64.0]]


def test_parts_of_an_input_may_have_formats_of_their_own():
    mixed = MixedActivation(
        (2, 2), (DynamicActivation(NumberFormat(2)), DynamicActivation(NumberFormat(8)))
    )

    found = mixed(torch.tensor([[1.0, 0.4, 127.0, 0.6]]))

    assert found.tolist() == [[1.0, 0.0, 127.0, 1.0]]


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
def test_a_name_says_bits_and_options(name, options):
    assert registry.resolve(name).options == options


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("w6a5x", "no scheme 'w6a5x': there are w6a8, w6a6"),
        ("w9a9", "no scheme 'w9a9'"),
        ("w6a6[grup=3]", "no option of .* named 'grup': there are group"),
        ("w6a6[group]", "needs a value"),
        ("w6a6[group=many]", "can't be 'many'"),
        ("abq-w6a6[epochs=-1]", "takes 0 epochs or more and rates above 0, got -1"),
        ("omniquant-w6a6[clip_rate=0]", r"rates above 0, got 20, 0\.005 and 0\.0"),
        ("omniquant-w6a6[alpha=2]", "alpha is a share"),
        ("smoothquant-w6a6[samples=0]", "at least 1 token"),
        ("gptq-w4a16[damping=0]", "damping must be above 0"),
    ],
)
def test_unknown_names_and_options_are_refused_in_one_line(name, words):
    with pytest.raises(QuantizeError, match=words) as refused:
        registry.resolve(name)

    assert "\n" not in str(refused.value)


def test_segments_are_pieces_of_the_text_each_once():
    tokens = torch.arange(1000)

    found = calibration_segments(tokens, segments=10, length=64, seed=3)

    starts = [int(segment[0]) for segment in found.tokens]
    assert len(set(starts)) == 10
    assert all(torch.equal(s, torch.arange(int(s[0]), int(s[0]) + 64)) for s in found.tokens)
    again = calibration_segments(tokens, segments=10, length=64, seed=3)
    assert torch.equal(again.tokens, found.tokens)


def test_a_text_too_short_to_calibrate_on_is_refused():
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


@pytest.mark.parametrize(
    "package", [flexq_bench.schemes, flexq_bench.accuracy], ids=lambda package: package.__name__
)
def test_every_exported_name_is_there(package):
    assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        package.missing  # noqa: B018
