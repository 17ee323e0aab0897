"""Number formats against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.contract import LinearKernel
from kernels.errors import ShapeError
from kernels.formats import Operand, quantize_symmetric
from kernels.formats.bitplanes import pack_planes, plane_weights, unpack_planes
from kernels.formats.symmetric import quantize_static
from kernels.registry import resolve


def quantize_by_the_paper(
    row: list[float], bits: int, group: int
) -> tuple[list[int], list[np.float16]]:
    """FlexQ's equations, one value at a time in double precision."""
    top = 2 ** (bits - 1) - 1
    codes: list[int] = []
    scales: list[np.float16] = []
    for start in range(0, len(row), group):
        values = row[start : start + group]
        scale = np.float16(max(abs(v) for v in values) / top)
        scales.append(scale)
        for value in values:
            quotient = 0.0 if scale == 0 else value / float(scale)
            # Python's round is to even, on the exact double quotient
            codes.append(max(-top - 1, min(top, round(quotient))))
    return codes, scales


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 64, 128, 300])
def test_codes_and_scales_are_the_papers_to_the_bit(bits: int, dtype: torch.dtype, k: int) -> None:
    generator = torch.Generator().manual_seed(bits * k)
    matrix = torch.randn(7, k, generator=generator, dtype=torch.float64) ** 3
    matrix[2] *= 1e-6
    matrix[3] = 0
    matrix = matrix.to(dtype)

    quantized = quantize_symmetric(matrix, bits)

    for row in range(7):
        codes, scales = quantize_by_the_paper(matrix[row].double().tolist(), bits, 128)
        assert quantized.values[row].tolist() == codes
        assert quantized.scales is not None
        assert quantized.scales[row].tolist() == [float(s) for s in scales]


def test_ties_go_to_the_even_code() -> None:
    row = torch.tensor([[31.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], dtype=torch.float16)

    assert quantize_symmetric(row, 6).values.tolist() == [[31, 0, 2, 2, 0, -2, -2]]


def test_a_group_that_is_all_zero_has_codes_and_scale_zero() -> None:
    matrix = torch.zeros(1, 256)
    matrix[0, 128:] = 3.0

    quantized = quantize_symmetric(matrix, 6)

    assert quantized.scales is not None
    assert quantized.scales[0, 0] == 0
    assert not quantized.values[0, :128].any()
    assert torch.equal(quantized.dequantize()[0, :128], torch.zeros(128, dtype=torch.float64))


def test_one_scale_a_row_covers_the_whole_row() -> None:
    matrix = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))

    quantized = quantize_symmetric(matrix, 8, None)

    assert quantized.scales is not None
    assert quantized.scales.shape == (3, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    matrix = torch.zeros(2, 128)
    matrix[1, 5] = bad

    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_symmetric(matrix, 6)


def test_values_past_an_fp16_scale_are_refused() -> None:
    with pytest.raises(ValueError, match="FP16 scale"):
        quantize_symmetric(torch.full((1, 4), 1e9), 6)


@pytest.mark.parametrize(("bits", "group"), [(1, 128), (9, 128), (6, 0)])
def test_bits_and_groups_that_make_no_sense_are_refused(bits: int, group: int) -> None:
    with pytest.raises(ShapeError):
        quantize_symmetric(torch.ones(1, 4), bits, group)


def test_an_operand_refuses_scales_of_another_shape() -> None:
    codes = torch.zeros(2, 300, dtype=torch.int8)

    with pytest.raises(ShapeError, match="2x3"):
        Operand(codes, torch.ones(2, 2, dtype=torch.float16), 6, 128)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**31))
def test_planes_hold_the_bits_of_twos_complement(bits: int, rows: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (rows, k), generator=generator).to(torch.int8)

    planes = unpack_planes(pack_planes(codes, bits), k)

    rebuilt = sum(
        plane.long() * weight for plane, weight in zip(planes, plane_weights(bits), strict=True)
    )
    assert isinstance(rebuilt, torch.Tensor)
    assert torch.equal(rebuilt, codes.long())


def test_a_plane_has_the_lowest_k_in_the_lowest_bit() -> None:
    codes = torch.zeros(1, 9, dtype=torch.int8)
    codes[0, 0] = 1
    codes[0, 8] = 1

    assert pack_planes(codes, 2)[0].tolist() == [[1, 1]]


def test_codes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="6 bits"):
        pack_planes(torch.tensor([[32]], dtype=torch.int8), 6)


def test_balanced_codes_have_as_many_levels_on_either_side() -> None:
    row = torch.tensor([[2.0, -2.0, 1.4, -1.6, 0.5, 0.0, -1.0]]).half()

    operand = quantize_symmetric(row, 3, None, top=2)

    assert operand.values.tolist() == [[2, -2, 1, -2, 0, 0, -1]]
    assert operand.scales is not None
    assert operand.scales.item() == 1


def test_balanced_kernels_refuse_codes_past_two() -> None:
    kernel = resolve("abq-w2*a8", "cpu")
    assert isinstance(kernel, LinearKernel)

    kernel.pack_weight(quantize_symmetric(torch.ones(1, 4), 3, None, top=2))
    with pytest.raises(ShapeError, match="within ±2, got one of 3"):
        kernel.pack_weight(quantize_symmetric(torch.ones(1, 4), 3, None))


def test_a_static_scale_is_every_rows_and_saturates() -> None:
    matrix = torch.tensor([[0.75, -1.125, 0.375], [1e4, -1e4, 0.0]]).half()

    operand = quantize_static(matrix, 8, 0.75)

    assert operand.values.tolist() == [[1, -2, 0], [127, -128, 0]]
    assert operand.scales is not None
    assert operand.scales.tolist() == [[0.75], [0.75]]


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.1, math.nan, math.inf])
def test_a_static_scale_that_is_no_fp16_number_is_refused(scale: float) -> None:
    with pytest.raises(ShapeError, match="positive FP16 number"):
        quantize_static(torch.ones(1, 4), 8, scale)
