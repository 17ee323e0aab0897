from __future__ import annotations

import pytest
import torch

from flexq_bench.schemes.atom import reordering
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.registry import resolve


def layers(model) -> dict[str, FakeQuantizedLinear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear)
    }


def test_largest_square_sums_stand_last():
    order = reordering(torch.tensor([9.0, 1.0, 5.0, 7.0]), outliers=2)

    assert order.tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("gptq", ["true", "false"])
def test_reordering_is_undone(tiny_llama, calibration, text, gptq):
    model = tiny_llama()
    original = model(text).logits.detach()

    resolve(
        f"atom-w8a8[outliers=16,gptq={gptq},activation_clip=1,weight_clip=1,kv_bits=16]"
    ).quantize(model, calibration)

    assert any(layer.order.tolist() != sorted(layer.order) for layer in layers(model).values())
    error = (model(text).logits.detach() - original).square().mean() / original.square().mean()
    assert float(error) < 0.01


def test_outliers_have_eight_bits_and_the_others_four(tiny_llama, calibration):
    model = tiny_llama()
    dense = model.model.layers[0].self_attn.q_proj.weight.detach()

    resolve("atom-w4a4[outliers=16,group=none,gptq=false,weight_clip=1]").quantize(
        model, calibration
    )

    layer = layers(model)["model.layers.0.self_attn.q_proj"]
    dense = dense[:, layer.order]
    for part, bits in ((slice(None, -16), 4), (slice(-16, None), 8)):
        halves = dense[:, part].abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1) / 2
        error = (layer.weight[:, part] - dense[:, part]).abs() / halves
        assert float(error.max()) == pytest.approx(1, rel=0.05)


def test_only_keys_and_values_are_rounded_for_the_cache(tiny_llama, calibration):
    model = tiny_llama()

    resolve("atom-w4a4[outliers=16]").quantize(model, calibration)

    rounded = {name.rsplit(".", 1)[-1] for name, layer in layers(model).items() if layer.output}
    assert rounded == {"k_proj", "v_proj"}


def test_layer_with_fewer_inputs_than_outliers_is_refused(tiny_llama, calibration):
    with pytest.raises(QuantizeError, match=r"64 inputs, too few to keep 128 .*outliers=8"):
        resolve("atom-w4a4").quantize(tiny_llama(), calibration)


def test_a_cache_that_no_layer_gives_alone_is_refused(build, calibration):
    with pytest.raises(QuantizeError, match=r"no k_proj and v_proj .*kv_bits=16"):
        resolve("atom-w4a4[outliers=8]").quantize(build("Phi3ForCausalLM"), calibration)
