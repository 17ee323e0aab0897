from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from flexq_bench.schemes.channels import SiteInput
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.registry import resolve
from flexq_bench.schemes.smoothing import (
    fold,
    gather,
    percentile_scale,
    smoothquant_scale,
    spread,
)


def random_scale(channels):
    return torch.exp(torch.randn(channels, generator=torch.Generator().manual_seed(7)))


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "closed"),
    [({"activation_function": "gelu"}, "fc1"), ({"layer_norm_elementwise_affine": False}, "norm")],
)
def test_no_scale_passes_nonlinear_functions(tiny_opt, calibration, text, change, closed):
    model = tiny_opt(**change)
    before = model(text).logits
    assert not any(
        closed in site_input.source for site_input in map_model(model).scalable_inputs(0)
    )

    for name in ("smoothquant-w8a8", "awq-w8a16", "dgq-w4a8", "omniquant-w8a8[epochs=0]"):
        quantized = tiny_opt(**change)
        resolve(name).quantize(quantized, calibration)
        error = (quantized(text).logits - before).norm() / before.norm()
        assert float(error) < (0.2 if "w4" in name else 0.02), name


def test_fold_knows_norms_that_add_one_to_their_weight():
    norm, reader = nn.LayerNorm(8, bias=False), nn.Linear(8, 3)
    site_input, x = SiteInput("norm", ("reader",), "norm"), torch.randn(5, 8)
    norm.weight.data = torch.randn(8)

    def compute():
        unit = nn.functional.layer_norm(x, (8,))
        return reader(unit * (norm.weight + 1))

    before = compute()
    fold(norm, [reader], replace(site_input, norm_offset=1.0), random_scale(8))

    torch.testing.assert_close(compute(), before)


def test_smoothquant_balances_activations_and_weights():
    inputs, weights = torch.tensor([100.0, 1.0]), torch.tensor([0.5, 2.0])

    even = smoothquant_scale(inputs, weights, 0.5)

    torch.testing.assert_close(inputs / even, weights * even)
    torch.testing.assert_close(smoothquant_scale(inputs, weights, 1.0), inputs)


def test_percentile_clips_only_the_largest_share_of_channels():
    inputs = torch.arange(1.0, 1001.0)

    scale = percentile_scale(inputs, 0.005)

    assert int((scale > 1).sum()) == 5
    assert float((inputs / scale).max()) == pytest.approx(995.0)


def test_heads_that_share_a_source_share_its_scale():
    site_input = SiteInput("self_attn.v_proj", ("o_proj",), "linear", shared_heads=2, head_dim=2)

    seen = spread(torch.tensor([1.0, 2.0, 3.0, 4.0]), site_input)

    assert seen.tolist() == [1, 2, 1, 2, 3, 4, 3, 4]
    assert gather(seen + torch.arange(8), site_input).tolist() == [3, 5, 9, 11]


def test_scale_that_is_not_positive_is_refused():
    site_input = SiteInput("norm", ("reader",), "norm")

    with pytest.raises(ValueError, match="above 0"):
        fold(nn.LayerNorm(2), [nn.Linear(2, 2)], site_input, torch.tensor([1.0, 0.0]))
