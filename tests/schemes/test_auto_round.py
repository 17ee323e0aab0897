"""AutoRound rounds with less error of a layer's output than to nearest."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.auto_round import learned_rounding

INT4 = NumberFormat(4, 32)


@pytest.fixture
def layer():
    """Weights [24, 80] and the moments of correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 80, generator=generator) @ torch.randn(80, 80, generator=generator)
    return torch.randn(24, 80, generator=generator), inputs.T @ inputs


def losses(weight, moments, operand):
    error = operand.dequantize(torch.float32) - weight
    return ((error @ moments) * error).sum(1)


def test_output_error_is_third_less_than_to_nearest(layer):
    weight, moments = layer
    nearest = losses(weight, moments, quantize(weight, INT4))
    learned = losses(weight, moments, learned_rounding(weight, moments, INT4, 200))
    assert bool((learned <= nearest * 1.001).all())
    assert float(learned.sum()) < 2 / 3 * float(nearest.sum())


def test_without_steps_it_rounds_to_nearest(layer):
    weight, moments = layer
    learned, nearest = learned_rounding(weight, moments, INT4, 0), quantize(weight, INT4)
    assert torch.equal(learned.values, nearest.values)
    assert torch.equal(learned.scales, nearest.scales)
