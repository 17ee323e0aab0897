"""Predicted sensitivities of single layers against measured ones, and the choice by budget."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch.nn import functional

from flexq_bench.accuracy.sensitivity.layer_kinds import restoring
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.calibration import Calibration
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.layer_sensitivity import (
    SiteSensitivity,
    activation_sensitivity,
    choose_sites,
    draw,
    layers_of,
)
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.uniform import FULL_BITS, round_site


def predicted(model, calibration, *, seed=0):
    return activation_sensitivity(
        model,
        map_model(model),
        calibration,
        low=NumberFormat(6, 32),
        high=NumberFormat(8, 32),
        generator=torch.Generator().manual_seed(seed),
    )


@torch.no_grad()
def measured(model, calibration, sensitivity):
    """KL divergence, nats a token, of the model with one site's inputs rounded."""
    dense = functional.log_softmax(model(calibration.tokens).logits.double(), -1)
    with restoring(model, [sensitivity.site]):
        round_site(model, sensitivity.site, FULL_BITS, 6, 32)
        found = functional.log_softmax(model(calibration.tokens).logits.double(), -1)
    return float((dense.exp() * (dense - found)).sum(-1).mean())


def test_sensitivity_equals_measured_divergence(tiny_llama):
    model = tiny_llama()
    tokens = torch.randint(0, 128, (48, 32), generator=torch.Generator().manual_seed(5))
    calibration = Calibration(tokens)

    sensitivities = predicted(model, calibration)

    found = [measured(model, calibration, sensitivity) for sensitivity in sensitivities]
    expected = [sensitivity.low for sensitivity in sensitivities]
    assert stats.spearmanr(expected, found).statistic > 0.9
    assert sum(expected) == pytest.approx(sum(found), rel=0.25)


def test_more_bits_leave_a_sixteenth_of_the_sensitivity(tiny_llama, calibration):
    sensitivities = predicted(tiny_llama(), calibration)

    # two bits more are a quarter of the step, and sensitivity goes with its square: (31/127)^2
    ratio = sum(sensitivity.high for sensitivity in sensitivities) / sum(
        sensitivity.low for sensitivity in sensitivities
    )
    assert ratio == pytest.approx((31 / 127) ** 2, rel=0.25)


def test_sensitivities_are_reproducible_and_leave_the_model_unchanged(
    tiny_llama, calibration, text
):
    model = tiny_llama()
    before = model(text).logits

    first, second = (predicted(model, calibration, seed=3) for _ in range(2))

    assert first == second
    assert torch.equal(model(text).logits, before)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_labels_are_drawn_by_their_probability():
    shares = torch.tensor([0.5, 0.0, 0.3, 0.2])

    drawn = draw(shares.log().expand(4000, 4), torch.Generator().manual_seed(0))

    found = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(found, shares, rtol=0, atol=0.025)
    assert found[1] == 0


def test_a_label_that_is_certain_is_drawn():
    certain = torch.full((3, 5), -torch.inf)
    certain[torch.arange(3), torch.tensor([0, 4, 2])] = 0

    assert draw(certain, torch.Generator().manual_seed(0)).tolist() == [0, 4, 2]


def test_gradients_past_the_dtype_are_refused(tiny_llama, calibration):
    model = tiny_llama()

    def overflow(module, arguments, output):
        output.register_hook(lambda gradient: gradient * float("inf"))

    model.model.norm.register_forward_hook(overflow)

    with pytest.raises(QuantizeError, match="leave the range"):
        predicted(model, calibration)


def test_a_model_that_predicts_nan_is_refused(tiny_llama, calibration):
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")

    with pytest.raises(QuantizeError, match="NaN"):
        predicted(model, calibration)


@pytest.fixture
def made_up(tiny_llama):
    """made_up(gains): a map, and sensitivities of its 14 sites; 0.1 where no gain is given."""
    layout = map_model(tiny_llama())

    def build(gains):
        return layout, tuple(
            SiteSensitivity(site, gains.get((site.block, site.kind), 0.1), 0.0)
            for site in layout.sites
        )

    return build


GAINS = {(0, "v_proj"): 5.0, (1, "up_proj"): 3.0, (1, "o_proj"): 2.0}
# o_proj has 64·64 products a token, gate and up together 2·192·64: six times as many
WORK = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 192 * 64)


@pytest.mark.parametrize(
    ("gains", "budget", "cost", "chosen"),
    [
        (GAINS, 3 / 14, "matrices", {"0": ["v_proj"], "1": ["o_proj", "up_proj"]}),
        (  # layers that read one input are chosen together
            *(GAINS, 2 / 8, "layers"),
            {"0": ["k_proj", "q_proj", "v_proj"], "1": ["gate_proj", "up_proj"]},
        ),
        (  # the most gain for its cost
            *({(0, "o_proj"): 1.0, (0, "up_proj"): 3.0}, 64 * 64 / WORK, "work"),
            {"0": ["o_proj"]},
        ),
    ],
)
def test_budget_goes_to_layers_that_gain_most(made_up, gains, budget, cost, chosen):
    layout, sensitivities = made_up(gains)

    names = choose_sites(sensitivities, layout, budget, cost)

    parts = [name.removeprefix("model.layers.").split(".")[::2] for name in names]
    blocks = {block for block, _ in parts}
    assert {b: sorted(kind for block, kind in parts if block == b) for b in blocks} == chosen


@pytest.mark.parametrize(("budget", "count"), [(0.0, 0), (0.3, 4), (0.5, 7), (1.0, 14)])
def test_a_budget_is_never_passed(made_up, budget, count):
    layout, sensitivities = made_up({})

    assert len(choose_sites(sensitivities, layout, budget, "matrices")) == count


def test_every_site_is_in_one_layer(made_up):
    layout, sensitivities = made_up({})

    layers = layers_of(sensitivities, layout)

    assert len(layers) == 8
    assert [d for layer in layers for d in layer] == list(sensitivities)


def test_a_budget_that_is_no_share_is_refused(made_up):
    layout, sensitivities = made_up({})

    with pytest.raises(QuantizeError, match=r"0 to 1, got 1\.5"):
        choose_sites(sensitivities, layout, 1.5)
