"""A quantized layer computed by the registry's kernels."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.decode.kernel_linear import ActivationBuffers, KernelLinear
from flexq_bench.kernels.formats import NumberFormat, quantize, quantize_mixed
from flexq_bench.kernels.formats.mixed import ACTIVATION_CLIP
from flexq_bench.schemes.activations import DynamicActivation, StaticActivation
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.quantized_layer import QuantizedLayer

N, K = 24, 200  # no multiple of a group
FORMATS = {
    "flexq": (NumberFormat(6, 128), NumberFormat(6, 128)),
    "flexq[w6a8]": (NumberFormat(6, 128), NumberFormat(8, 128)),
    "abq-w6a6": (NumberFormat(6), NumberFormat(6)),
    "cublaslt-w8a8": (NumberFormat(8), NumberFormat(8)),
    "w4a16": (NumberFormat(4, 128), None),
    "w8a16": (NumberFormat(8), None),
    "fp6-w6a16": (NumberFormat(6, kind="float"), None),
    "fp5-w5a16": (NumberFormat(5, kind="float"), None),
    "dgq-w4a8": (NumberFormat(4, 128, kind="dual"), NumberFormat(8)),
    "dual-w6a8": (NumberFormat(6, 128, kind="dual"), NumberFormat(8)),
    "mxfp4-w4a16": (NumberFormat.parse("mxfp4"), None),
    "mxfp6-w6a8": (NumberFormat.parse("mxfp6-e2m3"), NumberFormat(8)),
    "nvfp4-w4a16": (NumberFormat.parse("nvfp4"), None),
    "w4afp8": (NumberFormat(4, 128), NumberFormat.parse("fp8/row")),
}


def a_layer(weight, activation, *, bias=True):
    generator = torch.Generator().manual_seed(0)
    values = 0.1 * torch.randn(N, K, generator=generator)
    return QuantizedLayer(
        quantize(values, weight),
        None if activation is None else DynamicActivation(activation),
        torch.randn(N, generator=generator).half() if bias else None,
    )


def some_inputs(*shape):
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("label", FORMATS)
def test_each_kernel_agrees_with_the_reference(label):
    layer = a_layer(*FORMATS[label])
    module = KernelLinear("fc", layer)
    x = some_inputs(2, 7)
    assert module.kernel.spec.label == label
    y = module(x)
    assert (y.shape, y.dtype) == ((2, 7, N), torch.float32)
    torch.testing.assert_close(y, FakeQuantizedLinear("fc", layer)(x), rtol=2e-3, atol=2e-3)


def test_inputs_follow_the_channel_order_of_weights():
    generator = torch.Generator().manual_seed(0)
    values = 0.1 * torch.randn(N, K, generator=generator)
    order = torch.randperm(K, generator=generator).int()
    mixed = DynamicActivation(NumberFormat(4, 128, "mixed", ACTIVATION_CLIP))
    layer = QuantizedLayer(quantize_mixed(values, order), mixed)
    x = some_inputs(5)
    y = KernelLinear("fc", layer)(x)
    torch.testing.assert_close(y, FakeQuantizedLinear("fc", layer)(x), rtol=2e-3, atol=2e-3)


def test_many_tokens_equal_the_same_tokens_in_pieces():
    layer, buffers = a_layer(*FORMATS["flexq"]), ActivationBuffers()
    module = KernelLinear("fc", layer, buffers)
    x = some_inputs(3, 150).half()  # launches of 128 tokens, and what is left of them
    whole = module(x)
    assert whole.dtype == torch.float16
    pieces = torch.cat([module(part) for part in torch.split(x.view(-1, K), 50)])
    assert torch.equal(whole.view(-1, N), pieces)


def test_layers_of_one_shape_share_a_buffer(monkeypatch):
    layer, buffers = a_layer(*FORMATS["abq-w6a6"]), ActivationBuffers()
    modules = [KernelLinear(name, layer, buffers) for name in ("a", "b")]
    made = []
    kernel = modules[0].kernel
    empty = type(kernel).empty_activation
    monkeypatch.setattr(
        type(kernel),
        "empty_activation",
        lambda self, *sizes: made.append(sizes) or empty(self, *sizes),
    )
    for module in (*modules, *modules):
        module(some_inputs(4))
    assert len(made) == 1


def test_formats_without_kernel_are_refused_with_the_layer():
    with pytest.raises(QuantizeError, match=r"fc: no kernel reads int5/128 weights"):
        KernelLinear("fc", a_layer(NumberFormat(5, 128), NumberFormat(6, 128)))
    static = QuantizedLayer(
        quantize(torch.ones(N, K), NumberFormat(8)), StaticActivation(NumberFormat(8), 0.1)
    )
    with pytest.raises(
        QuantizeError, match="fc: no kernel multiplies int8/row weights with int8/tensor"
    ):
        KernelLinear("fc", static)


def test_layers_with_static_scales_share_buffers_and_keep_their_scales():
    weight = a_layer(NumberFormat(4, 128, "dual"), None).weight
    buffers, x = ActivationBuffers(), some_inputs(4)
    layers = [QuantizedLayer(weight, StaticActivation(NumberFormat(8), s)) for s in (0.5, 2**-6)]
    modules = [KernelLinear("fc", layer, buffers) for layer in layers]
    assert [module.kernel.spec.label for module in modules] == ["dgq-w4a8[static]"] * 2
    for module, layer in zip(modules * 2, layers * 2, strict=True):
        expected = FakeQuantizedLinear("fc", layer)(x)
        torch.testing.assert_close(module(x), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("value", "reason"), [(float("nan"), "NaN or infinity"), (1e6, r"inputs reach 1e\+06, kernels")]
)
def test_inputs_beyond_fp16_are_refused(value, reason):
    module = KernelLinear("fc", a_layer(*FORMATS["w4a16"]))
    x = some_inputs(3)
    x[1, 5] = value
    with pytest.raises(QuantizeError, match=f"fc: .*{reason}"):
        module(x)
