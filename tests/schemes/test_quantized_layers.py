"""Codes of every scheme: their formats and limits, and kernels that run them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.formats import format_of, quantize
from flexq_bench.kernels.formats.mixed import tail_start
from flexq_bench.kernels.reference import reference_gemm
from flexq_bench.kernels.registry import labels
from flexq_bench.kernels.registry import resolve as resolve_kernel
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.registry import resolve

# Formats of weights and activations of each scheme that a kernel runs.
FORMATS = {
    "flexq-w6ax": {("int6/128", "int6/128"), ("int6/128", "int8/128")},
    "w6a6": {("int6/128", "int6/128")},
    "w6a8": {("int6/128", "int8/128")},
    "w4a16": {("int4/128", "fp16")},
    "w8a16[group=none]": {("int8/row", "fp16")},
    "gptq-w4a16": {("uint4/128", "fp16")},
    "autoround-w4a16": {("int4/128", "fp16")},
    "awq-w4a16": {("uint4/128", "fp16")},
    "smoothquant-w8a8": {("int8/row", "int8/row")},
    "abq-w6a6[epochs=1]": {("int6/row", "int6/row")},
    "omniquant-w6a6[epochs=1]": {("int6/row", "int6/row")},
    "omniquant-w4a16[epochs=1,group=128,symmetric=false]": {("uint4/128", "fp16")},
    "dgq-w4a8[row_steps=8]": {("dual4/128", "int8/row")},
    "dual-w6a8[row_steps=2]": {("dual6/128", "int8/row")},
    "atom-w4a4": {("mixed4/128", "mixed4/128")},
    "fp6": {("fp6/row", "fp16")},
    "fp5": {("fp5/row", "fp16")},
}
FAMILIES = ("tiny_llama", "tiny_opt")


def by_hand(weight):
    """W, a column at a time, each where its channel is."""
    values = torch.empty(weight.rows, weight.k, dtype=torch.float64)
    for column in range(weight.k):
        group = 0 if weight.group is None else column // weight.group
        real = weight.values[:, column].double()
        if weight.zero_points is not None:
            real = real + weight.zero_points[:, group].double()
        real = real * weight.scales[:, group].double()
        if weight.row_scales is not None:
            real = real * weight.row_scales[:, 0].double()
        channel = column if weight.order is None else int(weight.order[column])
        values[:, channel] = real
    return values


def check_limits(weight):
    """Codes and zero points are those of as many bits as the format says."""
    number = format_of(weight)
    if number.kind == "float":
        assert set(weight.values.double().unique().tolist()) <= set(
            number.float_type.numbers().tolist()
        )
        return
    low, high = number.limits
    start = tail_start(weight.k, number.group) if number.kind == "mixed" else weight.k
    head, tail = weight.values[:, :start].int(), weight.values[:, start:].int()
    assert not head.numel() or low <= int(head.min()) <= int(head.max()) <= high
    assert not tail.numel() or -128 <= int(tail.min()) <= int(tail.max()) <= 127
    if weight.zero_points is not None:
        assert -high <= int(weight.zero_points.min()) <= int(weight.zero_points.max()) <= 0


def kernels_for(layer):
    """Of a CPU, that take this layer's formats; an activation's clip may be left to the caller."""
    activation = replace(layer.activation_format, clip=1.0)
    found = (resolve_kernel(label, "cpu") for label in labels("cpu"))
    return [
        kernel
        for kernel in found
        if isinstance(kernel, LinearKernel)
        and (kernel.spec.weight, kernel.spec.activation) == (layer.weight_format, activation)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_equals_fake_quantized_layer_on_same_codes(name, family, calibration, request):
    model = request.getfixturevalue(family)()
    sites = map_model(model).sites

    resolve(name).quantize(model, calibration)

    formats = set()
    for site in sites:
        module = model.get_submodule(site.name)
        layer = module.layer
        formats.add((layer.weight_format.name, layer.activation_format.name))
        check_limits(layer.weight)
        assert torch.equal(layer.weight.in_own_order(), by_hand(layer.weight))
        assert torch.equal(module.weight.double(), layer.weight.dequantize())
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(5, layer.weight.k, generator=generator).half() ** 3
        codes = quantize(inputs, layer.activation_format, order=layer.weight.order)
        if layer.weight_format.kind != "mixed":
            assert codes.order is None
        expected = reference_gemm(codes, layer.weight, layer.bias).y
        close = {"rtol": 2**-10, "atol": 2**-10 * float(expected.abs().max())}
        torch.testing.assert_close(module(inputs).double(), expected, **close)
        for kernel in kernels_for(layer):
            out = torch.empty(5, layer.weight.rows, dtype=torch.float16)
            weight = kernel.pack_weight(layer.weight)
            kernel.gemm(kernel.pack_activation(codes), weight, out, bias=layer.bias)
            torch.testing.assert_close(out.double(), expected, **close)
            if kernel.spec.activation == layer.activation_format and not kernel.spec.variant:
                packed = kernel.empty_activation(5, layer.weight.k, inputs.device)
                kernel.linear(inputs, packed, weight, out, bias=layer.bias)
                torch.testing.assert_close(out.double(), expected, **close)
    assert formats <= FORMATS[name]
    if family == "tiny_llama":
        assert formats == FORMATS[name]


@pytest.mark.parametrize("name", ["smoothquant-w6a6", "omniquant-w6a6[epochs=0]"])
def test_smoothed_weights_are_rounded_to_nearest(name, tiny_llama, calibration):
    model, dense = tiny_llama(), tiny_llama()
    sites = map_model(model).sites

    folds = resolve(name).quantize(model, calibration)

    for site in sites:
        found = model.get_submodule(site.name).layer.weight
        weight = dense.get_submodule(site.name).weight.detach().double()
        if site.name in folds.inputs:
            weight = weight * folds.inputs[site.name]
        if site.name in folds.outputs:
            weight = weight / folds.outputs[site.name][:, None]
        share = torch.sigmoid(torch.tensor(4.0)) if "omniquant" in name else 1.0
        scales = weight.abs().amax(dim=1, keepdim=True) * share / 31
        torch.testing.assert_close(found.scales.double(), scales, rtol=2**-10, atol=0)
        codes = (weight / found.scales.double()).clamp(-32, 31)
        assert float((codes - found.values.double()).abs().max()) < 0.501


def test_failure_names_its_block_and_leaves_later_blocks(tiny_llama, calibration):
    model, final = tiny_llama(), []
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = 1e9

    with pytest.raises(QuantizeError, match=r"w6a6: block 1: .* do not fit an FP16 scale"):
        resolve("w6a6").quantize(model, calibration, on_block=final.append)

    assert final == [0]
