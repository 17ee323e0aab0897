"""Distances of weights to the original's: damages that are named, and schemes that raise none."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from families import tiny_config
from transformers import AutoModelForCausalLM

from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.texts import read_text, tokenize
from flexq_bench.accuracy.weight_distances import weight_distances
from flexq_bench.decode.kernel_linear import ActivationBuffers, KernelLinear
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.calibration import calibration_segments
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.linear_layers import replace_module, with_linear_layers
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.registry import resolve
from flexq_bench.schemes.rotation import ChannelScales

UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
KEYS = "model.layers.2.self_attn.k_proj"


@pytest.fixture(scope="module")
def loaded(tiny_llama):
    return load_model(str(tiny_llama), device=torch.device("cpu"))


@pytest.fixture(scope="module")
def calibration(loaded, tiny_llama):
    tokens = tokenize(read_text(str(tiny_llama / "calibration.txt")), loaded.tokenizer)
    return calibration_segments(tokens, segments=2, length=128, seed=0)


def made_by(name, model, calibration):
    """A copy of a model under a scheme."""
    made, scheme = copy.deepcopy(model), resolve(name)
    scheme.quantize(made, calibration if scheme.needs_calibration else None, seed=0)
    return made


@pytest.fixture(scope="module")
def quantized(loaded, calibration):
    """quantized("gptq-w4a16"): tiny-llama under a scheme."""
    made = {}

    def build(name):
        if name not in made:
            made[name] = made_by(name, loaded.model, calibration)
        return copy.deepcopy(made[name])

    return build


def change_codes(model, layer, change):
    """Replace a layer's codes by `change(operand)`, or an unquantized weight in place."""
    module = model.get_submodule(layer)
    if isinstance(module, FakeQuantizedLinear):
        changed = replace(module.layer, weight=change(module.layer.weight))
        replace_module(model, layer, FakeQuantizedLinear(layer, changed))
    else:
        operand = type("Dense", (), {"values": module.weight.detach()})
        module.weight.data = change(operand)


def swap_rows(operand):
    values = operand.values.clone()
    values[[3, 9]] = values[[9, 3]]
    return values if isinstance(operand, type) else replace(operand, values=values)


def scale_rows(operand, rows=slice(6), factor=1.5):
    field = "values" if isinstance(operand, type) else "scales"
    scaled = getattr(operand, field).clone()
    scaled[rows] *= factor
    return scaled if isinstance(operand, type) else replace(operand, scales=scaled)


def shift_codes(operand):
    values = operand.values
    if isinstance(operand, type):
        return values + 0.02 * values.std()
    return replace(operand, values=torch.where(values == values.max(), values, values + 1))


def exchange(model, first, second):
    one, other = model.get_submodule(first), model.get_submodule(second)
    replace_module(model, first, other)
    replace_module(model, second, one)


def exchange_blocks(model):
    blocks = model.model.layers
    blocks[1], blocks[2] = blocks[2], blocks[1]


def scale_a_norm(model):
    model.model.layers[1].input_layernorm.weight.data[7] *= 1.5


def exchange_words(model):
    words = model.model.embed_tokens.weight.data
    words[[30, 31]] = words[[31, 30]]


DAMAGES = {
    "two rows": (lambda m: change_codes(m, UP, swap_rows), UP, "row 3 has the original's row 9"),
    "six scales": (lambda m: change_codes(m, UP, scale_rows), UP, "6 of 256 rows"),
    "one scale": (
        lambda m: change_codes(m, DOWN, lambda o: scale_rows(o, [4], 1.5)),
        DOWN,
        "row 4 is",
    ),
    "keys": (
        lambda m: change_codes(m, KEYS, lambda o: scale_rows(o, slice(None), 1.05)),
        KEYS,
        "1.05 times the original's",
    ),
    "codes": (lambda m: change_codes(m, UP, shift_codes), UP, "steps off on average"),
    "layers": (
        lambda m: exchange(m, DOWN, DOWN.replace("1", "2")),
        DOWN,
        f"it has the weights of the original's {DOWN.replace('1', '2')}",
    ),
    "blocks": (exchange_blocks, "model.layers.1", "it has the weights of the original's block 2"),
    "a norm": (scale_a_norm, "model.layers.1.input_layernorm", "channel 7"),
    "words": (exchange_words, "model.embed_tokens", "row 30 has the original's row 31"),
}


@pytest.mark.parametrize("scheme", ["fp16", "w8a16", "gptq-w4a16", "awq-w4a16", "smoothquant-w8a8"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(loaded, quantized, scheme, damage):
    change, name, words = DAMAGES[damage]
    model = quantized(scheme)
    change(model)
    found = {f.name: f.detail for f in weight_distances(model, loaded.model).findings}
    assert words in found[f"weights.{name}"]


@pytest.mark.parametrize(
    "scheme",
    [
        *("fp16", "w6a6", "w8a16", "w4a16", "fp6", "gptq-w4a16", "gptq-w3a16", "awq-w4a16"),
        *("smoothquant-w8a8", "dual-w6a8", "dgq-w4a8", "atom-w4a4", "duquant-w4a4"),
    ],
)
def test_undamaged_scheme_has_no_finding(loaded, quantized, scheme):
    report = weight_distances(quantized(scheme), loaded.model)
    assert report.findings == ()
    assert len(report.layers) == 28
    assert not report.not_judged


@torch.no_grad()
@pytest.mark.parametrize(
    "scheme",
    ["smoothquant-w8a8", "awq-w4a16", pytest.param("duquant-w6a6", marks=pytest.mark.slow)],
)
def test_channels_that_are_always_zero_may_have_any_factor(loaded, calibration, scheme):
    original = copy.deepcopy(loaded.model)
    for block in original.model.layers:
        block.post_attention_layernorm.weight[3::5] = 0
        block.mlp.up_proj.weight[5::7] = 0
        block.self_attn.v_proj.weight[::9] = 0
    model = made_by(scheme, original, calibration)

    assert not weight_distances(model, original).findings

    model.get_submodule(DOWN).weight[:, 4::7] *= 1.5  # of channels that count
    assert weight_distances(model, original).findings


def test_rotated_weights_are_not_judged(loaded, quantized):
    report = weight_distances(quantized("quarot-w6a6"), loaded.model)
    assert report.findings == ()
    assert len(report.not_judged) == 28


def test_rounding_to_nearest_is_0_29_steps(loaded, quantized):
    report = weight_distances(quantized("w8a16"), loaded.model)
    assert all(layer.steps == pytest.approx(12**-0.5, rel=0.01) for layer in report.layers)


@torch.no_grad()
def test_stored_buffer_that_differs_is_named():
    torch.manual_seed(0)
    original = with_linear_layers(AutoModelForCausalLM.from_config(tiny_config("dots1")))
    router = "model.layers.1.mlp.gate"
    model = copy.deepcopy(original)
    model.get_submodule(router).e_score_correction_bias += 0.5

    assert not weight_distances(copy.deepcopy(original), original).findings
    assert [found.name for found in weight_distances(model, original).findings] == [
        f"weights.{router}"
    ]


@torch.no_grad()
@pytest.mark.parametrize(
    "damage",
    [
        lambda weight: weight.mul_(1.05),
        lambda weight: weight[:, 9].zero_(),
        lambda weight: weight.zero_(),
        lambda weight: weight.add_(0.5 * weight.std() * torch.randn_like(weight)),
    ],
    ids=["scaled", "a column", "zeros", "noise"],
)
def test_damaged_embeddings_are_named(loaded, damage):
    torch.manual_seed(0)
    model = copy.deepcopy(loaded.model)
    damage(model.get_input_embeddings().weight)

    found = [finding.name for finding in weight_distances(model, loaded.model).findings]
    assert found == ["weights.model.embed_tokens"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("formats", "found"), [({}, 1), ({"model.embed_tokens.weight": NumberFormat(4, 32)}, 0)]
)
def test_rounded_embeddings_are_named_unless_they_are_codes(loaded, formats, found):
    model = copy.deepcopy(loaded.model)
    weight = model.get_input_embeddings().weight
    weight.copy_(weight.to(torch.float8_e4m3fn))

    assert len(weight_distances(model, loaded.model, formats).findings) == found


@pytest.mark.parametrize("part", ["q_proj", "v_proj"])
@torch.no_grad()
def test_bias_that_differs_is_named(part):
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(tiny_config("qwen2"))
    for block in original.model.layers:
        for linear in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
            linear.bias.normal_()
    model = copy.deepcopy(original)
    resolve("w4a16").quantize(model)
    damaged = f"model.layers.1.self_attn.{part}"

    assert not weight_distances(model, original).findings
    model.get_submodule(damaged).layer.bias[3] += 0.6
    assert [x.name for x in weight_distances(model, original).findings] == [f"weights.{damaged}"]


def negated_column(values):
    return torch.cat([values[:, :9], -values[:, 9:10], values[:, 10:]], dim=1)


def lost_columns(values):
    return torch.cat([values[:, :-8], torch.zeros_like(values[:, -8:])], dim=1)


@pytest.mark.parametrize(
    ("scheme", "damage"),
    [
        ("w4a16", negated_column),
        ("w4a16", lost_columns),
        ("flexq-w6ax", lost_columns),
        ("gptq-w4a16", negated_column),
    ],
)
def test_damaged_columns_are_named(quantized, loaded, scheme, damage):
    model = quantized(scheme)
    change_codes(model, DOWN, lambda operand: replace(operand, values=damage(operand.values)))

    (found,) = weight_distances(model, loaded.model).findings
    assert found.name == f"weights.{DOWN}"


def test_layers_of_kernels_are_compared_by_their_codes(quantized, loaded):
    model, buffers = quantized("w8a16"), ActivationBuffers()
    scale_a_norm(model)
    for name, module in [*model.named_modules()]:
        if isinstance(module, FakeQuantizedLinear):
            replace_module(model, name, KernelLinear(name, module.layer, buffers))

    (found,) = weight_distances(model, loaded.model).findings

    assert found.name == "weights.model.layers.1.input_layernorm"


@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4", "fp8", "w8a16"])
def test_lost_codes_are_named(quantized, loaded, scheme):
    """One in 250 codes of a layer is that of 0, which moves its rows by little."""
    model, lost = quantized(scheme), torch.arange(256 * 128) % 250 == 7

    def lose(operand):
        codes = torch.where(lost, 0, operand.values.float().flatten())
        return replace(operand, values=codes.view_as(operand.values).to(operand.values.dtype))

    change_codes(model, DOWN, lose)
    (found,) = weight_distances(model, loaded.model).findings
    assert found.name == f"weights.{DOWN}"


BLOCKS = {"int4/32": 4, "uint4/32": 4, "int6/16": 6, "mxfp4": 4}
LATE = "model.layers.3.mlp.down_proj"


def rounded_to(model, number):
    """A dense copy with rounded layers, as a GGUF file's, and their formats."""
    made, formats = copy.deepcopy(model), {}
    for name, module in made.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = quantize(module.weight.detach(), number).dequantize(torch.float32)
            module.weight.data, formats[f"{name}.weight"] = weight, number
    return made, formats


@pytest.mark.parametrize("name", BLOCKS)
def test_dense_weights_are_judged_in_their_formats(loaded, name):
    model, formats = rounded_to(loaded.model, NumberFormat.parse(name))
    assert not weight_distances(model, loaded.model, formats).findings
    if name != "mxfp4":  # of few numbers, so that most values stay as they are
        assert weight_distances(model, loaded.model).findings


def shift_groups(weight):
    """Add a step to each code, of alternating sign by group: a wrong zero point of Q4_0."""
    groups = weight.view(len(weight), -1, 32)
    signs = torch.tensor([1.0, -1.0]).repeat(groups.shape[1] // 2)[:, None]
    groups += signs * groups.abs().amax(2, keepdim=True) / 7


def double_a_group(weight):
    weight[5, :32] *= 2


def scale_a_column(weight):
    weight[:, 9] *= 1.5


FORMAT_DAMAGES = {
    "a column": (scale_a_column, LATE, "column 9"),
    "codes of a layer": (shift_groups, LATE, "steps from the original's"),
    "a group": (double_a_group, LATE, "row 5"),
    "a late layer": (lambda weight: weight.mul_(1.05), LATE, "1.05 times the original's"),
}


@pytest.mark.parametrize("damage", FORMAT_DAMAGES)
def test_damage_of_dense_weights_is_named(loaded, damage):
    change, name, words = FORMAT_DAMAGES[damage]
    model, formats = rounded_to(loaded.model, NumberFormat(4, 32))
    change(model.get_submodule(name).weight.data)
    found = {f.name: f.detail for f in weight_distances(model, loaded.model, formats).findings}
    assert list(found) == [f"weights.{name}"]
    assert words in found[f"weights.{name}"]


def test_scales_of_an_input_are_undone(loaded):
    model, scales = copy.deepcopy(loaded.model), torch.linspace(0.5, 2, 128)
    dense = model.get_submodule(UP).weight.detach()
    operand = quantize(dense / scales, NumberFormat(4, 32))
    layer = QuantizedLayer(operand, rotation=ChannelScales(scales))
    replace_module(model, UP, FakeQuantizedLinear(UP, layer))
    assert not weight_distances(model, loaded.model).findings
