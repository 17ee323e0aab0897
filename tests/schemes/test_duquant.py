"""DuQuant: rotations built from outliers, models that they leave as they are, few bits."""

from __future__ import annotations

import copy

import pytest
import torch

from flexq_bench.accuracy.agreement import AgreementMeter, layer_errors, record_reference
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.decode.loading import label_of
from flexq_bench.errors import UsageError
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.schemes.calibration import calibration_segments
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.registry import resolve
from flexq_bench.schemes.rotation import outlier_rotation


def inputs_with_outliers(channels):
    x = torch.randn(50, channels, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[:, 3] *= 40  # both in the first block
    x[:, 5] *= 20
    return x


@pytest.mark.parametrize(("channels", "block"), [(64, 16), (576, 96), (86, 86), (172, 86)])
def test_a_rotation_from_outliers_is_orthogonal_and_spreads_them(channels, block):
    x = inputs_with_outliers(channels)
    rotation = outlier_rotation(x, 16 if channels == 64 else 128, steps=16, seed=0)
    one = torch.eye(channels, dtype=torch.float64)
    whole = rotation.apply(one)

    assert rotation.blocks.shape == (2, channels // block, block, block)
    torch.testing.assert_close(whole @ whole.T, one, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotation.undo(whole), one, rtol=0, atol=1e-5)
    assert float(rotation.apply(x).abs().max()) < 0.5 * float(x.abs().max())


def test_permutation_distributes_outliers_over_blocks():
    x = inputs_with_outliers(64)
    rotation = outlier_rotation(x, 16, steps=4, seed=0)
    within = torch.cat([x[:, :16] @ rotation.blocks[0, 0].double().T, x[:, 16:]], dim=1)

    def spread(rows):
        largest = rows.abs().view(50, 4, 16).amax(dim=(0, 2))
        return float(largest.max() / largest.min())

    assert sorted(rotation.order.tolist()) == list(range(64))
    assert spread(rotation.apply(x)) < 2 < spread(within)


def test_a_rotation_refuses_other_channels():
    rotation = outlier_rotation(inputs_with_outliers(64), 16, steps=1, seed=0)
    with pytest.raises(ShapeError, match="64 channels takes as many, got 32"):
        rotation.apply(torch.ones(2, 32))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_a_rotated_model_computes_what_it_did(architecture, build, text, calibration):
    model = build(architecture)
    rotated = copy.deepcopy(model)

    folds = resolve("duquant-w16a16[steps=8]").quantize(rotated, calibration)

    with torch.no_grad():
        expected, found = (one(text).logits.double() for one in (model, rotated))
    error = (found - expected).norm() / expected.norm()
    assert float(error) < 6e-3  # weights are FP16 after they were rotated
    assert max(layer_errors(model, rotated, text[0], folds).values()) < 1e-5


def test_the_seed_alone_decides(tiny_llama, calibration):
    def codes(seed):
        model = tiny_llama()
        resolve("duquant-w4a4[steps=4]").quantize(model, calibration, seed=seed)
        layers = [m.layer for m in model.modules() if isinstance(m, FakeQuantizedLinear)]
        assert all(layer.rotation is not None for layer in layers)
        return torch.cat([layer.weight.dequantize(torch.float32).flatten() for layer in layers])

    assert torch.equal(codes(1), codes(1))
    assert not torch.equal(codes(1), codes(2))


def test_fewer_bits_lose_less_when_they_are_rotated(shipped_llama):
    model, ids = shipped_llama
    reference = record_reference(model, ids, context=256)
    calibration = calibration_segments(ids, segments=2, length=256)

    def divergence(name):
        quantized = copy.deepcopy(model)
        resolve(name).quantize(quantized, calibration)
        meter = AgreementMeter(reference)
        perplexity(quantized, ids, context=256, on_logits=meter)
        return meter.result().mean_kl

    assert divergence("duquant-w4a4") < 0.75 * divergence("rtn-w4a4")


def test_options_are_checked_and_decode_refuses_its_layers():
    with pytest.raises(QuantizeError, match="steps is at least 1"):
        resolve("duquant-w4a4[steps=0]")
    with pytest.raises(UsageError, match="input of q_proj is rotated"):
        label_of("q_proj", resolve("duquant-w6a6").layer_formats("q_proj", gated=True))
