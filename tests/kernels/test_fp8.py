"""Scaled E4M3 against the format's definition, by enumerating its numbers."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.contract import checked_scales
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat, Operand, quantize_e4m3, quantize_symmetric
from flexq_bench.kernels.reference import reference_gemm


def e4m3_numbers() -> torch.Tensor:
    """Every number from 0 to 448 in order; those of even place have an even mantissa.

    OCP 8-bit floating point specification: exponent bias 7, subnormals in steps of 2^-9, and the
    code 15/7 is NaN.
    """
    codes = range(15 * 8 + 7)
    return torch.tensor(
        [
            m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)
            for e, m in (divmod(c, 8) for c in codes)
        ],
        dtype=torch.float64,
    )


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    numbers = e4m3_numbers()
    distance = (values.abs().double().unsqueeze(-1) - numbers).abs()
    tied = distance == distance.amin(dim=-1, keepdim=True)
    even = torch.arange(len(numbers)) % 2 == 0
    place = (tied.int() * 2 + (tied & even).int()).argmax(dim=-1)
    return numbers[place] * values.sign()


def test_codes_are_nearest_with_ties_to_even():
    numbers = e4m3_numbers()
    ties = (numbers[1:] + numbers[:-1]) / 2
    generator = torch.Generator().manual_seed(1)
    others = torch.randn(2000, generator=generator).double() * 60
    row = torch.cat([numbers, -ties, others.clamp(-448, 448)])[None].half()
    row[0, 0] = 448  # its scale is 1

    operand = quantize_e4m3(row)

    assert operand.scales.item() == 1
    assert torch.equal(operand.values.double(), nearest_e4m3(row))


def test_row_scale_is_rounded_to_fp16():
    matrix = torch.tensor([[1.0, -3.0], [700.0, 0.1], [0.0, 0.0]]).half()

    operand = quantize_e4m3(matrix)

    expected = (torch.tensor([[3.0], [700.0], [0.0]]) / 448).half()
    assert torch.equal(operand.scales, expected)
    assert operand.dequantize()[2].tolist() == [0.0, 0.0]


def test_values_past_a_rounded_scale_saturate():
    # 3.5e-5 / 448 is 1.3 times FP16's smallest number, to which it rounds.
    matrix = torch.tensor([[3.5e-5, 1e-5]]).half()

    operand = quantize_e4m3(matrix)

    assert bool(torch.isfinite(operand.values.double()).all())
    assert operand.values.double()[0, 0] == 448


def test_rounding_gives_what_the_codes_stand_for():
    matrix = torch.randn(6, 96, generator=torch.Generator().manual_seed(4)).half()
    matrix[0, 0], matrix[1] = 300, matrix[1] * 1e-6

    rounded = NumberFormat(8, None, "float").round(matrix)

    assert torch.equal(rounded.double(), quantize_e4m3(matrix).dequantize())


def test_integer_and_fp8_codes_are_not_interchangeable():
    matrix = torch.ones(2, 8).half()
    fp8, int8 = NumberFormat(8, kind="float"), NumberFormat(8)

    assert (fp8.name, int8.name) == ("fp8/row", "int8/row")
    assert not fp8.is_integer
    with pytest.raises(ShapeError, match="need codes of format fp8/row, got int8/row"):
        checked_scales(quantize_symmetric(matrix, 8, None), fp8)
    with pytest.raises(ShapeError, match="need codes of format int8/row, got fp8/row"):
        checked_scales(quantize_e4m3(matrix), int8)


def test_fp8_sums_have_tolerance_of_terms_and_fewer_bits():
    x = quantize_e4m3(torch.tensor([[448.0, 448.0]]).half())
    w = quantize_e4m3(torch.tensor([[448.0, -448.0]]).half())
    integers = quantize_symmetric(torch.ones(1, 2).half(), 8, None)
    dense = Operand(torch.ones(1, 2).half(), None, 16, None)

    reference = reference_gemm(x, w)

    assert float(reference.y) == 0
    assert float(reference.magnitude) == 2 * 448.0**2
    assert reference.sum_bits < 24
    assert reference_gemm(dense, integers).sum_bits == 24


def test_float_sums_have_fewer_bits_than_integer_sums():
    long = Operand(torch.ones(1, 1 << 15).half(), None, 16, None)
    codes = quantize_symmetric(torch.ones(1, 1 << 15).half(), 8, None)

    assert reference_gemm(long, long).sum_bits == 23
    assert reference_gemm(codes, codes).sum_bits == 24
