"""Number formats: their names, what they refuse, and rounding against the definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import (
    FP16,
    NumberFormat,
    format_of,
    quantization,
    quantize,
)
from flexq_bench.kernels.reference import reference_gemm
from flexq_bench.kernels.registry import labels, resolve


def a_matrix(rows, k, seed=0):
    """Values of many sizes, one row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, k, generator=generator, dtype=torch.float64) ** 3
    matrix[-1] = 0
    return matrix


@pytest.mark.parametrize("name", ["fp5/row", "fp5/128", "fp6/row", "fp6/128", "fp8/row"])
def test_small_floats_are_what_kernels_are_given(name):
    matrix, number = a_matrix(5, 300).float(), NumberFormat.parse(name)
    matrix[1] *= 1e-6

    assert torch.equal(number.round(matrix).double(), quantize(matrix, number).dequantize())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_asymmetric_rounding_is_its_definition(bits):
    matrix = a_matrix(4, 100) + torch.tensor([[0.0], [3.0], [-5.0], [0.0]])
    matrix[1:3] = matrix[1:3].abs() * torch.tensor([[1.0], [-1.0]])  # of one sign: zero at an end
    top, number = 2**bits - 1, NumberFormat(bits, 64, "asymmetric")

    rounded, operand = number.round(matrix), quantize(matrix, number)

    assert format_of(operand) == number
    assert torch.equal(operand.dequantize(), rounded.double())
    for row in range(4):
        for start in (0, 64):
            values = matrix[row, start : start + 64].tolist()
            low, high = min(0.0, *values), max(0.0, *values)
            scale = float(np.float16((high - low) / top))
            zero = min(top, max(0, round(-low / scale))) if scale else 0
            assert int(operand.zero_points[row, start // 64]) == -zero
            for place, value in enumerate(values):
                code = min(top, max(0, round(value / scale) + zero)) if scale else zero
                assert int(operand.values[row, start + place]) == code
                assert rounded[row, start + place] == np.float32((code - zero) * scale)


def test_the_reference_multiplies_codes_with_zero_points():
    x, w = a_matrix(3, 100).half(), quantize(a_matrix(5, 100, 1), NumberFormat(4, 64, "asymmetric"))

    found = reference_gemm(quantize(x, FP16), w).y

    torch.testing.assert_close(found, x.double() @ w.dequantize().T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("number", "shares"),
    [
        (NumberFormat(4, 64, "normal"), None),
        (NumberFormat(4, 64, "dual", clip=0.5), None),
        (NumberFormat(4, 64, "asymmetric"), torch.ones(5, 2)),
        (NumberFormat(4, 64), torch.ones(2, 5)),
    ],
)
def test_codes_of_other_formats_are_refused(number, shares):
    with pytest.raises(ShapeError):
        quantize(a_matrix(5, 100), number, shares=shares)


@pytest.mark.parametrize(
    ("number", "row", "rounded"),
    [
        (  # five levels around zero
            NumberFormat(3, None, "balanced"),
            *([-2.0, -1.1, 0.2, 1.4, 2.0], [-2.0, -1.0, 0.0, 1.0, 2.0]),
        ),
        (NumberFormat(6, None, clip=0.5), [31.0, 62.0, -62.0], [31.0, 31.0, -32.0]),
    ],
)
def test_values_are_rounded_and_saturate(number, row, rounded):
    assert number.round(torch.tensor([row])).tolist() == [rounded]


def test_the_largest_value_of_a_group_keeps_its_size():
    matrix = a_matrix(3, 256).half()

    rounded = NumberFormat(6, 128, "float").round(matrix)

    largest = matrix[0, :128].abs().argmax()
    assert rounded[0, largest] == pytest.approx(float(matrix[0, largest]), rel=2**-10)
    assert not rounded[-1].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_are_refused(bad):
    matrix = a_matrix(2, 100)
    matrix[1, 5] = bad

    for name in ("int4/row", "uint4/row", "balanced4/row", "fp6/row", "fp8/row", "dual4/48"):
        number = NumberFormat.parse(name)
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize(matrix, number)
        if number.kind != "dual":
            with pytest.raises(ValueError, match="NaN or infinity"):
                number.round(matrix)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "float"])
def test_values_past_an_fp16_scale_are_refused(kind):
    with pytest.raises(ValueError, match="FP16 scale"):
        NumberFormat(6, None, kind).round(torch.full((1, 4), 1e9))


@pytest.mark.parametrize(
    ("bits", "group", "kind", "clip"),
    [
        (9, None, "symmetric", 1.0),
        (7, None, "float", 1.0),
        (16, None, "symmetric", 1.0),
        (8, None, "dense", 1.0),
        (2, None, "balanced", 1.0),
        (6, 0, "symmetric", 1.0),
        (6, None, "symmetric", 0.0),
        (4, None, "mixed", 1.0),
    ],
)
def test_formats_that_make_no_sense_are_refused(bits, group, kind, clip):
    with pytest.raises(ShapeError):
        NumberFormat(bits, group, kind, clip)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (NumberFormat(6, 128), "int6/128"),
        (NumberFormat(4, None, "asymmetric"), "uint4/row"),
        (NumberFormat(6, None, "float"), "fp6/row"),
        (NumberFormat(8, 128, "float"), "fp8/128"),
        (NumberFormat(4, 64, "normal"), "nf4/64"),
        (NumberFormat(3, None, "balanced"), "balanced3/row"),
        (NumberFormat(4, 128, "dual"), "dual4/128"),
        (NumberFormat(6, 128, "dual"), "dual6/128"),
        (NumberFormat(4, 128, "mixed"), "mixed4/128"),
        (FP16, "fp16"),
    ],
)
def test_format_name_parses_to_the_format(number, name):
    assert number.name == name
    assert NumberFormat.parse(name) == number


@pytest.mark.parametrize("name", ["", "int6", "int6/", "fp16/row", "bf8", "int9/128", "int6/0"])
def test_what_names_no_format_is_refused(name):
    with pytest.raises(ShapeError):
        NumberFormat.parse(name)


@pytest.mark.parametrize(
    ("number", "limits"),
    [
        (NumberFormat(6, 128), (-32, 31)),
        (NumberFormat(4, None, "asymmetric"), (0, 15)),
        (NumberFormat(3, None, "balanced"), (-2, 2)),
        (NumberFormat(4, 128, "dual"), (0, 15)),
        (NumberFormat(6, 128, "dual"), (-31, 31)),
    ],
)
def test_integer_codes_lie_within_the_formats_limits(number, limits):
    assert number.limits == limits


@pytest.mark.parametrize("label", labels("cpu"))
def test_a_kernels_operands_have_the_formats_of_its_specification(label):
    kernel = resolve(label, "cpu")
    if not isinstance(kernel, LinearKernel):
        pytest.skip("a probe takes no operands")
    matrix = a_matrix(3, 300).half()

    for operand, number in (
        (kernel.quantize_weight(matrix), kernel.spec.weight),
        (kernel.quantize_activation(matrix), kernel.spec.activation),
    ):
        given = format_of(operand)
        assert (given.bits, given.group) == (number.bits, number.group)
        assert given.kind == ("symmetric" if number.kind == "balanced" else number.kind)


@pytest.mark.parametrize(
    "name", ["int4/48", "uint4/48", "fp6/row", "dual4/48", "mixed4/48", "fp16"]
)
def test_rows_are_rounded_the_same_alone_and_together(name, monkeypatch):
    matrix, number = a_matrix(7, 100), NumberFormat.parse(name)
    whole = quantize(matrix, number)

    monkeypatch.setattr(quantization, "_CHUNK_VALUES", 300)
    parts = quantize(matrix, number)

    assert parts.rows == 7
    assert torch.equal(parts.dequantize(), whole.dequantize())
    assert format_of(parts) == format_of(whole)
