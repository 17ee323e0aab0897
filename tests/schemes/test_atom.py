from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.formats import NumberFormat
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
