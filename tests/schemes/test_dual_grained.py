from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexq_bench.schemes.awq import output_error
from flexq_bench.schemes.dual_grained import PLAIN, SearchOptions, dual_grained

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
def test_lifted_codes_never_leave_int8(seed, n, k, spread):
    weight, moments = drawn(seed, n, k, spread)

    for options in (PLAIN, QUICK):
        packed = dual_grained(weight, moments, 32, options)

        assert int(packed.lifted().abs().max()) <= 127
        assert int(packed.codes.max()) <= 15
        assert int(packed.zeros.max()) <= 15
        assert int(packed.group_scale.min()) >= 1


def test_weights_are_row_scale_times_group_scale_times_code_less_zero():
    weight, moments = drawn(0, 4, 70, 1.0)

    packed = dual_grained(weight, moments, 32, QUICK)

    for row in range(4):
        for column in range(70):
            group = column // 32
            code = int(packed.codes[row, column]) - int(packed.zeros[row, group])
            lifted = int(packed.group_scale[row, group]) * code
            expected = float(packed.row_scale[row, 0]) * lifted
            assert packed.dequantize()[row, column].item() == expected


@pytest.mark.parametrize("seed", range(5))
def test_two_phases_err_less_than_plain_rounding_on_two_levels(seed):
    weight, moments = drawn(seed, 24, 192, 0.5)

    errors = [
        output_error(
            weight - dual_grained(weight, moments, 64, options).dequantize(), moments.double()
        )
        for options in (PLAIN, QUICK)
    ]

    assert errors[1] < 0.97 * errors[0]


def test_weights_of_zero_stay_zero():
    weight, moments = drawn(0, 3, 64, 0.0)
    weight[1] = 0

    packed = dual_grained(weight, moments, 32, QUICK)

    assert bool((packed.dequantize()[1] == 0).all())
    assert bool(torch.isfinite(packed.dequantize()).all())
