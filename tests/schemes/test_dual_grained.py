from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexq_bench.kernels.formats import NumberFormat, quantize, quantize_dual_grained
from flexq_bench.kernels.formats.dual_grained import int8_values
from flexq_bench.schemes.awq import output_error
from flexq_bench.schemes.dual_grained import (
    SearchOptions,
    search_dual_grained,
    search_six_bits,
)

QUICK = SearchOptions.of_steps(6, 12)
SHARES = (1.0, 0.9, 0.8, 0.7)
SIX = NumberFormat(6, 32, "dual")


def drawn(seed, n, k, spread):
    """Weights [n, k] whose groups differ in size, and second moments of their inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    weight *= torch.exp(spread * torch.randn(1, k, generator=generator))
    inputs = torch.randn(2 * k, k, generator=generator)
    return weight, inputs.T @ inputs


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 70), st.floats(0, 3))
def test_codes_lift_to_int8_as_the_kernel_wants_them(seed, n, k, spread):
    weight, moments = drawn(seed, n, k, spread)

    found = search_dual_grained(weight, moments, 32, QUICK)

    lifted = int8_values(found)  # which refuses codes, scales and zero points out of range
    assert int(lifted.abs().max()) <= 127
    assert int(found.scales.min()) >= 1
    assert torch.equal(found.dequantize(), lifted.double() * found.row_scales.double())


@pytest.mark.parametrize("seed", range(5))
def test_two_phase_search_beats_rounding_to_nearest(seed):
    weight, moments = drawn(seed, 24, 192, 0.5)

    errors = [
        output_error(weight - found.dequantize(), moments.double())
        for found in (
            quantize_dual_grained(weight, 64),
            search_dual_grained(weight, moments, 64, QUICK),
        )
    ]

    assert errors[1] < 0.97 * errors[0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 70), st.floats(0, 3))
def test_six_bit_search_fits_int8_and_beats_rounding_to_nearest(seed, n, k, spread):
    weight, _ = drawn(seed, n, k, spread)

    found, nearest = search_six_bits(weight, None, 32, SHARES), quantize(weight, SIX)

    for operand in (found, nearest):
        lifted = int8_values(operand)  # which refuses codes and scales out of range
        assert torch.equal(operand.dequantize(), lifted.double() * operand.row_scales.double())
    errors = [
        (weight.double() - operand.dequantize()).square().sum(dim=1) for operand in (found, nearest)
    ]
    assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all())


@pytest.mark.parametrize("seed", range(3))
def test_six_bits_searched_for_the_output_err_less_there(seed):
    weight, moments = drawn(seed, 24, 192, 0.5)
    size = torch.exp(torch.randn(192, generator=torch.Generator().manual_seed(seed)))
    moments *= torch.outer(size, size)  # of inputs of which some are larger

    errors = [
        output_error(weight - found.dequantize(), moments.double())
        for found in (
            quantize(weight, NumberFormat(6, 64, "dual")),
            search_six_bits(weight, None, 64, SHARES),
            search_six_bits(weight, moments, 64, SHARES),
        )
    ]

    assert errors[2] < min(errors[:2])


@pytest.mark.parametrize(
    "search",
    [
        lambda weight, moments: search_dual_grained(weight, moments, 32, QUICK),
        lambda weight, moments: search_six_bits(weight, moments, 32, SHARES),
        lambda weight, moments: quantize(weight, SIX),
    ],
)
def test_weights_of_zero_stay_zero(search):
    weight, moments = drawn(0, 3, 64, 0.0)
    weight[1] = 0

    packed = search(weight, moments)

    assert bool((packed.dequantize()[1] == 0).all())
    assert bool(torch.isfinite(packed.dequantize()).all())
