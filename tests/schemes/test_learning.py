from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.kernels.formats.grouping import in_groups, safe_divisor
from flexq_bench.schemes import block_training
from flexq_bench.schemes.block_training import BlockTrainer
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.losses import attention_divergence, double_log_cosine
from flexq_bench.schemes.registry import resolve
from flexq_bench.schemes.straight_through import fake_quantize


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(
        [
            NumberFormat(4, 32),
            NumberFormat(6),
            NumberFormat(3, None, "balanced"),
            NumberFormat(4, 32, "asymmetric"),
            NumberFormat(3, None, "asymmetric", 0.9),
        ],
    ),
)
def test_training_rounds_as_the_format_does(seed, number):
    values = torch.randn(5, 70, generator=torch.Generator().manual_seed(seed)).double()

    assert torch.equal(fake_quantize(values, number).float(), number.round(values))


class Through(torch.autograd.Function):
    """Rounded forward, the gradient of what was rounded backward: the straight-through rule."""

    @staticmethod
    def forward(ctx, values, rounded):
        return rounded.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def step_by_step(values, number, shares):
    """fake_quantize as a chain of functions whose gradients are torch's own."""
    rows, k = values.shape
    grouped = in_groups(values, number.group)
    top = 2 ** (number.bits - 2) if number.kind == "balanced" else 2 ** (number.bits - 1) - 1
    bottom = -top if number.kind == "balanced" else -top - 1
    reach = grouped.abs().amax(dim=-1, keepdim=True) * number.clip
    if shares is not None:
        reach = reach * shares.unsqueeze(-1)
    scales = Through.apply(reach / top, (reach / top).to(torch.float16).to(values.dtype))
    unit = grouped / safe_divisor(scales, values.dtype)
    codes = Through.apply(unit, torch.round(unit)).clamp(bottom, top)
    return (codes * scales).reshape(rows, -1)[:, :k]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(
        [
            NumberFormat(4, 32),
            NumberFormat(6, clip=0.9),
            NumberFormat(3, None, "balanced"),
            NumberFormat(3, 16),
        ],
    ),
    st.booleans(),
)
def test_the_gradient_is_that_of_each_step(seed, number, clipped):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(5, 70, generator=generator).double()
    values[1] = 0  # no scale
    values[2, :3] = values[2].abs().max() + 1  # two with the largest magnitude
    values[2, 1] *= -1
    groups = 1 if number.group is None else -(-70 // number.group)
    shares = torch.rand(5, groups, generator=generator).double() + 0.2 if clipped else None
    weight = torch.randn(5, 70, generator=generator).double()
    found = []
    for function in (fake_quantize, step_by_step):
        leaves = [values.clone().requires_grad_()]
        leaves += [] if shares is None else [shares.clone().requires_grad_()]
        rounded = function(leaves[0], number, leaves[1] if clipped else None)
        (rounded * weight).sum().backward()
        found.append([rounded.detach(), *(leaf.grad for leaf in leaves)])

    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_codes_of_a_clipped_range_stay_within_it():
    values = torch.tensor([[1.0, -0.5, 0.1, 0.0]], dtype=torch.float64)

    rounded = fake_quantize(values, NumberFormat(4), torch.tensor([[0.5]]).double())

    scale = torch.tensor(0.5 / 7).to(torch.float16).double()
    assert rounded.tolist() == [[7 * scale, -7 * scale, scale, 0.0]]


def test_double_log_cosine_is_zero_for_equal_outputs():
    states = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))

    assert float(double_log_cosine(states, states, states)) == pytest.approx(0, abs=1e-6)
    away = states + torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(1))
    near = states + 0.1 * (away - states)
    assert 0 < double_log_cosine(near, states, states) < double_log_cosine(away, states, states)


def test_attention_divergence_is_the_sum_of_both_kullback_leibler_divergences():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(torch.randn(2, 3, 5, generator=generator), -1) for _ in range(2))

    both = (p * (p / q).log()).sum(-1).mean() + (q * (q / p).log()).sum(-1).mean()

    assert float(attention_divergence(p, q)) == pytest.approx(float(both), rel=1e-5)
    masked = torch.tensor([[1.0, 0.0]])
    assert float(attention_divergence(masked, masked)) == 0


@pytest.fixture
def trained(monkeypatch):
    """What training found for each block, in order."""
    found = []
    train = BlockTrainer.train
    monkeypatch.setattr(
        BlockTrainer, "train", lambda *args: found.append(train(*args)) or found[-1]
    )
    return found


@pytest.mark.parametrize("name", ["omniquant-w3a8[epochs=5]", "abq-w3a8[epochs=5]"])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_opt"])
def test_training_lowers_the_loss_of_every_block(name, family, calibration, trained, request):
    resolve(name).quantize(request.getfixturevalue(family)(), calibration)

    assert len(trained) == 2
    for block in trained:
        assert block.losses[-1] < 0.95 * block.losses[0]


def test_quantized_block_computes_what_was_trained(tiny_llama, calibration, trained):
    model = tiny_llama()

    resolve("omniquant-w3a8[epochs=5]").quantize(model, calibration)

    states = [
        tiny_model(calibration.tokens, output_hidden_states=True).hidden_states[1].detach()
        for tiny_model in (model, tiny_llama())
    ]
    # The last epoch's loss is the mean along its way, the quantized block is where it ended.
    loss = float((states[0] - states[1]).square().mean())
    assert loss == pytest.approx(trained[0].losses[-1], rel=0.1)


def test_compensation_is_learned_at_both_ends_only(tiny_llama, calibration, trained):
    resolve("abq-w4a4[epochs=1]").quantize(tiny_llama(), calibration)
    resolve("abq-w4a4[epochs=1,compensated_blocks=0]").quantize(tiny_llama(), calibration)

    assert [list(block.compensation) for block in trained] == [["mlp.down_proj"]] * 2 + [[], []]
    left, _ = trained[0].compensation["mlp.down_proj"]
    assert bool(left.abs().max() > 0)


def test_maps_that_do_not_fit_are_computed_anew(tiny_llama, calibration, trained, monkeypatch):
    resolve("abq-w4a4[epochs=2]").quantize(tiny_llama(), calibration)
    monkeypatch.setattr(block_training, "_MAPS_ON_A_CPU", 0)
    resolve("abq-w4a4[epochs=2]").quantize(tiny_llama(), calibration)

    assert [block.losses for block in trained[:2]] == [block.losses for block in trained[2:]]


def test_balanced_two_bits_are_five_levels_around_zero(tiny_llama, calibration):
    model = tiny_llama()

    resolve("abq-w2*a8[epochs=1]").quantize(model, calibration)

    levels = [row.unique() for row in model.model.layers[0].mlp.up_proj.weight]
    assert max(len(found) for found in levels) == 5
    for found in levels:
        if len(found) == 5:
            torch.testing.assert_close(found, -found.flip(0))


def test_weight_only_learns_clipping_and_no_scales(tiny_llama, calibration, trained):
    resolve("omniquant-w4a16[epochs=1]").quantize(tiny_llama(), calibration)

    assert not trained[0].scales
    assert trained[0].clips


def test_attention_is_left_as_it_was(tiny_llama, calibration):
    model = tiny_llama()
    before = model.config._attn_implementation

    resolve("abq-w4a4[epochs=1]").quantize(model, calibration)

    assert model.config._attn_implementation == before


def test_activations_with_a_zero_point_are_refused():
    with pytest.raises(QuantizeError, match="signed integers, not uint4/row"):
        BlockTrainer(
            torch.nn.Module(), {}, (), NumberFormat(4), NumberFormat(4, None, "asymmetric"), {}, (),
            None,
        )  # fmt: skip


def test_asymmetric_range_is_clipped_at_both_ends():
    values = torch.tensor([[-1.0, -0.2, 0.1, 2.0]], dtype=torch.float64)
    shares = torch.tensor([[[0.5, 0.25]]]).double().requires_grad_()
    number = NumberFormat(4, None, "asymmetric")

    rounded = fake_quantize(values, number, shares)
    rounded[0, 3].backward(retain_graph=True)

    assert rounded[0].tolist() == pytest.approx([-0.5, -0.2, 0.1, 0.5], abs=0.04)
    assert torch.equal(
        rounded.detach().float(),
        quantize(values, number, shares=shares.detach()).dequantize().float(),
    )
    assert shares.grad[0, 0, 1] == pytest.approx(2.0, rel=0.1)  # of the largest value, 2


@pytest.mark.parametrize(
    "name", [pytest.param("omniquant-w3a8", marks=pytest.mark.slow), "abq-w3a8"]
)
def test_zero_points_are_trained_as_they_are_rounded(name, tiny_llama, calibration, trained):
    """Weights far from symmetric, which is what zero points are for."""
    codes = {}
    for symmetric in ("true", "false"):
        model = tiny_llama()
        with torch.no_grad():
            for block in model.model.layers:
                block.mlp.up_proj.weight.abs_()
        resolve(f"{name}[epochs=3,symmetric={symmetric}]").quantize(model, calibration)
        codes[symmetric] = model.model.layers[0].mlp.up_proj.layer.weight

    symmetric, asymmetric = trained[:2], trained[2:]
    assert asymmetric[0].losses[-1] < min(symmetric[0].losses[-1], asymmetric[0].losses[0])
    assert codes["true"].zero_points is None
    assert codes["false"].zero_points is not None
