from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.registry import resolve


def layers(model):
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear)
    }


def test_channels_with_the_largest_square_sums_stand_last(tiny_llama, calibration):
    model, seen = tiny_llama(), []
    down = model.model.layers[0].mlp.down_proj
    down.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach()))
    model(calibration.tokens)

    resolve("atom-w4a4[gptq=false]").quantize(model, calibration)

    order = layers(model)["model.layers.0.self_attn.q_proj"].layer.weight.order
    assert sorted(order.tolist()) == list(range(64))
    square_sums = seen[0].double().square().sum(dim=(0, 1))
    order = layers(model)["model.layers.0.mlp.down_proj"].layer.weight.order.long()
    assert set(order[-20:].tolist()) == set(square_sums.topk(20).indices.tolist())


@pytest.mark.parametrize("gptq", ["true", "false"])
def test_reordering_is_undone(tiny_llama, calibration, text, gptq):
    model = tiny_llama()
    original = model(text).logits.detach()

    resolve(f"atom-w8a8[group=16,gptq={gptq},activation_clip=1,weight_clip=1]").quantize(
        model, calibration
    )

    assert any(layer.order.tolist() != sorted(layer.order) for layer in layers(model).values())
    error = (model(text).logits.detach() - original).square().mean() / original.square().mean()
    assert float(error) < 0.01


@pytest.mark.parametrize(("group", "tail"), [(128, 64), (16, 16)])
def test_the_last_group_has_eight_bits_and_the_others_four(tiny_llama, calibration, group, tail):
    model = tiny_llama()
    dense = model.model.layers[0].mlp.down_proj.weight.detach()

    resolve(f"atom-w4a4[group={group},gptq=false,weight_clip=0.5]").quantize(model, calibration)

    layer = layers(model)["model.layers.0.mlp.down_proj"].layer
    dense = dense[:, layer.weight.order.long()].double()
    parts = [(start, 4, 0.5) for start in range(0, 192 - tail, group)] + [(192 - tail, 8, 1)]
    for place, (start, bits, clip) in enumerate(parts):
        end, top = min(start + group, 192), 2 ** (bits - 1) - 1
        block = dense[:, start:end]
        scale = (block.abs().amax(dim=1, keepdim=True) * clip / top).half().double()
        codes = (block / scale).round().clamp(-top - 1, top)
        assert torch.equal(layer.weight.values[:, start:end].double(), codes)
        assert torch.equal(layer.weight.scales[:, place : place + 1].double(), scale)
    assert layer.weight_format == NumberFormat(4, group, "mixed")
    assert layer.activation_format == NumberFormat(4, group, "mixed", 0.9)


@pytest.mark.parametrize("bits", [8, 16])
def test_outliers_without_groups_are_the_last_128_channels(tiny_llama, calibration, bits):
    model = tiny_llama()
    dense = model.model.layers[0].mlp.down_proj.weight.detach()

    resolve(f"atom-w4a4[group=none,outlier_bits={bits},gptq=false,weight_clip=1]").quantize(
        model, calibration
    )

    found = layers(model)["model.layers.0.mlp.down_proj"]
    ordered = dense[:, found.order]
    head = quantize(ordered[:, :64], NumberFormat(4)).dequantize(torch.float16)
    tail = ordered[:, 64:].half()
    if bits == 8:
        tail = quantize(ordered[:, 64:], NumberFormat(8)).dequantize(torch.float16)
    assert torch.equal(found.layer.weight.values, torch.cat([head, tail], dim=1))
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(0)).half()
    rounded = found.activation(x)
    assert torch.equal(rounded[:, :64], NumberFormat(4, clip=0.9).round(x[:, :64]))
    kept = x[:, 64:].float() if bits == 16 else NumberFormat(8).round(x[:, 64:])
    assert torch.equal(rounded[:, 64:], kept)


def test_gptq_of_outliers_without_groups_is_refused():
    with pytest.raises(QuantizeError, match="gptq=false"):
        resolve("atom-w4a4[group=none]")
