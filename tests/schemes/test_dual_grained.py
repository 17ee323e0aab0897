from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexq_bench.schemes.awq import output_error
from flexq_bench.schemes.dual_grained import SearchOptions, search_dual_grained
from kernels.formats import quantize_dual_grained
from kernels.formats.dual_grained import int8_values

QUICK = SearchOptions.of_steps(6, 12)


def drawn(seed: int, n: int, k: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
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
def test_two_phases_err_less_than_rounding_to_nearest_on_two_levels(seed):
    weight, moments = drawn(seed, 24, 192, 0.5)

    errors = [
        output_error(weight - found.dequantize(), moments.double())
        for found in (
            quantize_dual_grained(weight, 64),
            search_dual_grained(weight, moments, 64, QUICK),
        )
    ]

    assert errors[1] < 0.97 * errors[0]


def test_weights_of_zero_stay_zero():
    weight, moments = drawn(0, 3, 64, 0.0)
    weight[1] = 0

    packed = search_dual_grained(weight, moments, 32, QUICK)

    assert bool((packed.dequantize()[1] == 0).all())
    assert bool(torch.isfinite(packed.dequantize()).all())
