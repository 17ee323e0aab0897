from __future__ import annotations

import pytest
import torch
from families import ARCHITECTURES

from flexq_bench.kernels.formats import quantize
from flexq_bench.schemes.activations import StaticActivation
from flexq_bench.schemes.awq import AwqOptions, clip_and_round, output_error
from flexq_bench.schemes.calibration import InputSamples
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.registry import resolve

SCHEMES = (
    "gptq-w4a16",
    "gptq-w4a8[act_order=true,group=32]",
    "fp6",
    "fp5[gptq=true]",
    "awq-w4a16",
    "smoothquant-w6a6",
    "smoothquant-w6a6[alpha=none]",
    "omniquant-w6a6[epochs=1]",
    "abq-w6a6[epochs=1]",
    "dgq-w4a8[row_steps=8]",
    "dgq-w4a8[static=true,search=false]",
    "dual-w6a8[row_steps=2]",
    "atom-w4a4[group=16]",
)


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("tiny_llama", name) for name in SCHEMES), *(("tiny_opt", name) for name in SCHEMES[-7::2])],
)
def test_scheme_gives_the_same_numbers_again(name, family, calibration, text, request):
    states = []
    for _ in range(2):
        model = request.getfixturevalue(family)()
        sites = map_model(model).sites
        resolve(name).quantize(model, calibration)
        states.append(model.state_dict())

    assert all(hasattr(model.get_submodule(site.name), "activation") for site in sites)
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert bool(torch.isfinite(model(text).logits).all())


IN_HALF = ("awq-w4a16", "smoothquant-w6a6", "abq-w4a8[epochs=1]", "atom-w4a4[group=16]")


def in_half_precision():
    """Every architecture in two turns, which exchange data types; the fast tests have one scheme
    of every other architecture."""
    for place, architecture in enumerate(ARCHITECTURES):
        if place % 2:
            yield architecture, place // 2 % 2, (IN_HALF[place // 2 % 4],)
        for turn in (0, 1):
            yield pytest.param(architecture, turn, IN_HALF, marks=pytest.mark.slow)


@pytest.mark.parametrize(("architecture", "turn", "schemes"), [*in_half_precision()])
def test_half_precision_models_of_any_architecture_can_be_quantized(
    architecture, turn, schemes, calibration, text, build
):
    for place, name in enumerate(schemes):
        if architecture == "FalconForCausalLM" and name.startswith("abq"):
            continue  # its attention gives no maps to train on, and says so
        dtype = (torch.float16, torch.bfloat16)[(place // 2 + turn) % 2]
        model = build(architecture).to(dtype)
        resolve(name).quantize(model, calibration)
        logits = model(text).logits
        assert logits.dtype == dtype
        assert bool(torch.isfinite(logits).all())


def logits_error(build, name, calibration, text):
    """Relative squared error of the logits."""
    model = build()
    original = model(text).logits.detach()
    resolve(name).quantize(model, calibration)
    found = model(text).logits.detach()
    return float((found - original).square().mean() / original.square().mean())


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("fp6", "fp5"),
        ("fp5[gptq=true]", "fp5"),
        ("gptq-w4a16", "gptq-w3a16"),
        ("awq-w3a16", "awq-w3a16[steps=1,clip_steps=0]"),
        ("dgq-w4a8", "dgq-w4a8[search=false]"),
        ("dgq-w4a8[group=16,weights=group]", "dgq-w4a8[weights=channel]"),
        ("dgq-w4a8[weights=channel]", "dgq-w4a8[weights=channel,search=false]"),
        ("atom-w3a8[group=16]", "atom-w3a8[group=16,gptq=false]"),
        ("atom-w4a4[group=16]", "atom-w4a4[outliers=false,group=none,gptq=false]"),
        ("omniquant-w3a8[epochs=5]", "rtn-w3a8"),
        ("abq-w2*a8[epochs=2]", "abq-w2a8[epochs=2]"),
    ],
)
def test_scheme_lowers_logit_error(better, worse, tiny_llama, calibration, text):
    assert logits_error(tiny_llama, better, calibration, text) < logits_error(
        tiny_llama, worse, calibration, text
    )


def test_clipping_errs_no_more_than_the_whole_range():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 96, generator=generator) ** 3
    inputs = torch.randn(200, 96, generator=generator)
    moments = inputs.T @ inputs
    options = AwqOptions(4, group=96)

    clipped = clip_and_round(weight, moments, options)

    whole = quantize(weight, options.number())
    errors = (output_error(weight - w.dequantize(), moments.double()) for w in (clipped, whole))
    ours, theirs = errors
    assert ours < theirs


def test_static_scale_is_that_of_the_calibration(tiny_llama, calibration):
    model = tiny_llama()

    resolve("dgq-w4a8[static=true,outliers=0]").quantize(model, calibration)

    activation = model.model.layers[0].self_attn.q_proj.activation
    assert isinstance(activation, StaticActivation)
    largest = float(tiny_norm_outputs(tiny_llama(), calibration).detach().abs().max())
    assert activation.scale == float(torch.tensor(largest / 127).half())


def tiny_norm_outputs(model, calibration):
    seen = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda _m, _i, o: seen.append(o))
    model(calibration.tokens)
    return seen[0]


def test_samples_are_spread_over_segments_and_hold_first_tokens(tiny_llama):
    site = map_model(tiny_llama()).sites[0]
    samples = InputSamples(rows=6, per_segment=4)

    for segment in range(2):
        samples(site, torch.arange(8.0)[:, None] + 100 * segment)

    assert samples.of(site)[:, 0].tolist() == [0, 2, 4, 6, 100, 102]


@pytest.mark.parametrize(
    "name",
    [
        *("gptq-w4a16", "fp6[gptq=true]", "smoothquant-w6a6", "dgq-w4a8"),
        "flexq-w6ax[a8_budget=0.25]",
    ],
)
def test_scheme_without_calibration_data_is_refused(name, tiny_llama):
    with pytest.raises(QuantizeError, match="needs calibration"):
        resolve(name).quantize(tiny_llama())
