"""Operands, bit planes, balanced codes and static scales."""

from __future__ import annotations

import math

import operands
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexq_bench.kernels.cpu.bitplane import pack_planes, plane_weights, unpack_planes
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import Operand, quantize_symmetric
from flexq_bench.kernels.formats.symmetric_quantization import quantize_static


@pytest.mark.parametrize(
    ("groups", "parts", "message"),
    [
        (2, {}, "2x3"),
        (3, {"zero_points": torch.zeros(2, 2, dtype=torch.int8)}, "zero points must be 2x3"),
        (3, {"order": torch.arange(299, dtype=torch.int32)}, "order of 300 columns"),
    ],
)
def test_an_operand_refuses_parts_of_another_shape(groups, parts, message):
    codes, scales = torch.zeros(2, 300, dtype=torch.int8), torch.ones(2, groups).half()

    with pytest.raises(ShapeError, match=message):
        Operand(codes, scales, 4, 128, **parts)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**31))
def test_planes_hold_the_bits_of_twos_complement(bits, rows, k, seed):
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (rows, k), generator=generator).to(torch.int8)

    planes = unpack_planes(pack_planes(codes, bits), k)

    rebuilt = sum(
        plane.long() * weight for plane, weight in zip(planes, plane_weights(bits), strict=True)
    )
    assert torch.equal(rebuilt, codes.long())


def test_lowest_k_is_in_the_lowest_bit():
    codes = torch.zeros(1, 9, dtype=torch.int8)
    codes[0, 0] = 1
    codes[0, 8] = 1

    assert pack_planes(codes, 2)[0].tolist() == [[1, 1]]


def test_codes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="6 bits"):
        pack_planes(torch.tensor([[32]], dtype=torch.int8), 6)


def test_balanced_codes_have_as_many_levels_on_either_side():
    row = torch.tensor([[2.0, -2.0, 1.4, -1.6, 0.5, 0.0, -1.0]]).half()

    operand = quantize_symmetric(row, 3, None, top=2)

    assert operand.values.tolist() == [[2, -2, 1, -2, 0, 0, -1]]
    assert operand.scales.item() == 1


def test_balanced_kernels_refuse_codes_past_two():
    kernel = operands.linear_kernel("abq-w2*a8", "cpu")

    kernel.pack_weight(quantize_symmetric(torch.ones(1, 4), 3, None, top=2))
    with pytest.raises(ShapeError, match="within ±2, got one of 3"):
        kernel.pack_weight(quantize_symmetric(torch.ones(1, 4), 3, None))


def test_a_static_scale_is_every_rows_and_saturates():
    matrix = torch.tensor([[0.75, -1.125, 0.375], [1e4, -1e4, 0.0]]).half()

    operand = quantize_static(matrix, 8, 0.75)

    assert operand.values.tolist() == [[1, -2, 0], [127, -128, 0]]
    assert operand.scales.tolist() == [[0.75], [0.75]]


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.1, math.nan, math.inf])
def test_static_scale_beyond_fp16_is_refused(scale):
    with pytest.raises(ShapeError, match="positive FP16 number"):
        quantize_static(torch.ones(1, 4), 8, scale)
