"""QuaRot: rotations, models that they leave as they are, and what they do for few bits."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from flexq_bench.accuracy.agreement import AgreementMeter, layer_errors, record_reference
from flexq_bench.accuracy.kernel_linear import KernelLinear
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.decode.loading import label_of
from flexq_bench.errors import UsageError
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.registry import resolve
from flexq_bench.schemes.rotation import HadamardRotation, online_rotation, residual_rotation


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


def test_rotation_refuses_wrong_number_of_channels():
    with pytest.raises(ShapeError, match="12 times a power of two channels, got 36"):
        online_rotation(1536).apply(torch.ones(2, 36))


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
def test_a_rotated_model_computes_what_it_did(architecture, changes, build, text):
    model = build(architecture, **changes)
    rotated = copy.deepcopy(model)

    folds = resolve("quarot-w16a16").quantize(rotated)

    with torch.no_grad():
        expected, found = (one(text).logits.double() for one in (model, rotated))
    assert not torch.equal(rotated.model.embed_tokens.weight, model.model.embed_tokens.weight)
    error = (found - expected).norm() / expected.norm()
    assert float(error) < 6e-3  # weights are FP16 after they were rotated
    errors = layer_errors(model, rotated, text[0], folds)
    assert max(errors.values()) < 1e-5


def test_fewer_bits_lose_less_when_they_are_rotated(shipped_llama):
    model, ids = shipped_llama
    reference = record_reference(model, ids, context=256)

    def divergence(name):
        quantized = copy.deepcopy(model)
        resolve(name).quantize(quantized)
        meter = AgreementMeter(reference)
        perplexity(quantized, ids, context=256, on_logits=meter)
        return meter.result().mean_kl

    for bits in ("w6a6", "w4a4"):
        assert divergence(f"quarot-{bits}") < 0.75 * divergence(f"rtn-{bits}")


def test_kernels_take_what_the_rotation_gives(tiny_llama):
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


def test_decode_refuses_an_input_that_is_rotated():
    formats = resolve("quarot-w6a6").layer_formats("down_proj", gated=True)
    with pytest.raises(UsageError, match="input of down_proj is rotated"):
        label_of("down_proj", formats)


def test_models_that_cannot_be_rotated_are_refused(tiny_opt):
    with pytest.raises(QuantizeError, match=r"rotates LlamaForCausalLM, .*, not OPTForCausalLM"):
        resolve("quarot-w4a4").quantize(tiny_opt())


def test_a_clip_of_the_paper_is_an_option():
    activation = resolve("quarot-w4a4[activation_clip=0.9]").options.activation
    assert (activation.name, activation.clip) == ("int4/row", 0.9)
    with pytest.raises(QuantizeError, match="clip is a share"):
        resolve("quarot-w4a4[activation_clip=1.5]")


def test_a_rotation_moves_with_its_layer():
    rotation = HadamardRotation(torch.eye(3), torch.ones(6)).to("meta")
    assert rotation.block.device.type == "meta"
    assert rotation.signs.device.type == "meta"
