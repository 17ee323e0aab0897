"""QuaRot, SpinQuant and DuQuant: rotations, models of which they change nothing, and few bits."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from flexq_bench.accuracy.agreement import AgreementMeter, layer_errors, record_reference
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.decode.kernel_linear import KernelLinear
from flexq_bench.decode.loading import label_of
from flexq_bench.errors import UsageError
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.schemes.calibration import calibration_segments
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.registry import resolve
from flexq_bench.schemes.rotation import (
    HadamardRotation,
    online_rotation,
    outlier_rotation,
    residual_rotation,
)


@pytest.mark.parametrize(
    ("channels", "block"),
    [(64, 1), (576, 36), (1536, 12), (1792, 28), (160, 20), (344, 43), (9, 9)],
)
def test_rotation_is_orthogonal_with_hadamard_blocks(channels, block):
    rotation = residual_rotation(channels, seed=3)
    whole = rotation.apply(torch.eye(channels, dtype=torch.float64))

    assert rotation.block.shape == (block, block)
    one = torch.eye(channels, dtype=torch.float64)
    torch.testing.assert_close(whole @ whole.T, one, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotation.undo(whole), one, rtol=0, atol=1e-6)
    if block % 4 == 0 or block == 1:  # every channel gets an equal part of each
        flat = torch.full_like(whole, channels**-0.5)
        torch.testing.assert_close(whole.abs(), flat, rtol=1e-5, atol=0)


def inputs_with_outliers(channels):
    x = torch.randn(50, channels, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[:, 3] *= 40  # both in the first block
    x[:, 5] *= 20
    return x


@pytest.mark.parametrize(("channels", "block"), [(64, 16), (576, 96), (86, 86), (172, 86)])
def test_outlier_rotation_is_orthogonal_and_spreads_outliers(channels, block):
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


def test_rotation_refuses_wrong_number_of_channels():
    with pytest.raises(ShapeError, match="12 times a power of two channels, got 36"):
        online_rotation(1536).apply(torch.ones(2, 36))
    rotation = outlier_rotation(inputs_with_outliers(64), 16, steps=1, seed=0)
    with pytest.raises(ShapeError, match="64 channels takes as many, got 32"):
        rotation.apply(torch.ones(2, 32))


@pytest.mark.parametrize(
    "name", ["quarot-w16a16", "duquant-w16a16[steps=8]", "spinquant-w16a16[steps=3]"]
)
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (
            "LlamaForCausalLM",
            {"tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True},
        ),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {}),
    ],
)
def test_rotated_model_computes_the_same(name, architecture, changes, build, text, calibration):
    model = build(architecture, **changes)
    rotated = copy.deepcopy(model)

    folds = resolve(name).quantize(rotated, calibration)

    with torch.no_grad():
        expected, found = (m(text).logits.double() for m in (model, rotated))
    if not name.startswith("duquant"):
        assert not torch.equal(rotated.model.embed_tokens.weight, model.model.embed_tokens.weight)
    error = (found - expected).norm() / expected.norm()
    assert float(error) < 6e-3  # weights are FP16 after they were rotated
    assert max(layer_errors(model, rotated, text[0], folds).values()) < 1e-5


@pytest.mark.slow
def test_few_bits_lose_less_if_rotated(shipped_llama):
    model, ids = shipped_llama
    reference = record_reference(model, ids, context=256)
    calibration = calibration_segments(ids, segments=2, length=256)

    def divergence(name):
        quantized = copy.deepcopy(model)
        resolve(name).quantize(quantized, calibration)
        meter = AgreementMeter(reference)
        perplexity(quantized, ids, context=256, on_logits=meter)
        return meter.result().mean_kl

    losses = {bits: divergence(f"rtn-{bits}") for bits in ("w6a6", "w4a4")}
    for name, bits in (("quarot", "w6a6"), ("quarot", "w4a4"), ("duquant", "w4a4")):
        assert divergence(f"{name}-{bits}") < 0.75 * losses[bits]
    assert divergence("spinquant-w3a3") < divergence("quarot-w3a3")


def test_kernels_get_rotated_inputs(tiny_llama):
    model = tiny_llama()
    resolve("quarot-w6a6").quantize(model)
    modules = [m for m in model.modules() if isinstance(m, FakeQuantizedLinear)]

    assert sum(module.layer.rotation is not None for module in modules) == 4
    for module in modules:
        x = torch.randn(5, module.in_features, generator=torch.Generator().manual_seed(0)).half()
        expected = module(x.float())
        close = {"rtol": 2**-9, "atol": 2**-9 * float(expected.abs().max())}
        torch.testing.assert_close(KernelLinear("", module.layer)(x).float(), expected, **close)
        if module.layer.rotation is not None:
            bare = FakeQuantizedLinear("", replace(module.layer, rotation=None))
            assert not torch.allclose(bare(x.float()), expected, atol=0.1)


def test_decode_refuses_rotated_inputs():
    for name, kind in (("quarot-w6a6", "down_proj"), ("duquant-w6a6", "q_proj")):
        formats = resolve(name).layer_formats(kind, gated=True)
        with pytest.raises(UsageError, match=f"input of {kind} is rotated"):
            label_of(kind, formats)


def test_models_that_cannot_be_rotated_are_refused(tiny_opt):
    with pytest.raises(QuantizeError, match=r"rotates LlamaForCausalLM, .*, not OPTForCausalLM"):
        resolve("quarot-w4a4").quantize(tiny_opt())


def test_a_clip_of_the_paper_is_an_option():
    activation = resolve("quarot-w4a4[activation_clip=0.9]").options.activation
    assert (activation.name, activation.clip) == ("int4/row", 0.9)


def test_seed_determines_the_codes(tiny_llama, calibration):
    def codes(seed):
        model = tiny_llama()
        resolve("duquant-w4a4[steps=4]").quantize(model, calibration, seed=seed)
        layers = [m.layer for m in model.modules() if isinstance(m, FakeQuantizedLinear)]
        assert all(layer.rotation is not None for layer in layers)
        return torch.cat([layer.weight.dequantize(torch.float32).flatten() for layer in layers])

    assert torch.equal(codes(1), codes(1))
    assert not torch.equal(codes(1), codes(2))


def test_rotation_moves_with_its_layer():
    rotation = HadamardRotation(torch.eye(3), torch.ones(6)).to("meta")
    assert rotation.block.device.type == "meta"
    assert rotation.signs.device.type == "meta"
