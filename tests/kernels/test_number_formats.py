"""Number formats of schemes against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import ShapeError
from kernels.formats import NumberFormat, Scaling, quantize_minifloat, quantize_symmetric


def a_matrix(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    """Values of many sizes, one row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, k, generator=generator, dtype=torch.float64) ** 3
    matrix[-1] = 0
    return matrix


def all_numbers(mantissa_bits: int) -> list[float]:
    """Every non-negative E3Mx by the standard's formula, ascending."""
    numbers = []
    for exponent in range(8):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            # OCP Microscaling formats 1.0, section 5.3.2: exponent bias 3, subnormals at 0
            numbers.append(
                2.0 ** (exponent - 3) * (1 + fraction) if exponent else 2.0**-2 * fraction
            )
    return numbers


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("group", [None, 128, 48])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_symmetric_rounding_is_what_kernels_are_given(
    bits: int, group: int | None, dtype: torch.dtype
) -> None:
    matrix = a_matrix(5, 300).to(dtype)

    rounded = NumberFormat(bits, group).round(matrix)

    assert torch.equal(rounded.double(), quantize_symmetric(matrix, bits, group).dequantize())


@pytest.mark.parametrize(("bits", "kind"), [(6, "e3m2"), (5, "e3m1")])
@pytest.mark.parametrize("group", [None, 128])
def test_small_floats_are_what_kernels_are_given(bits: int, kind: str, group: int | None) -> None:
    matrix = a_matrix(5, 300).float()

    rounded = NumberFormat(bits, group, kind).round(matrix)  # type: ignore[arg-type]

    assert torch.equal(rounded.double(), quantize_minifloat(matrix, bits, group).dequantize())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_asymmetric_rounding_is_its_definition(bits: int) -> None:
    matrix = a_matrix(4, 100) + torch.tensor([[0.0], [3.0], [-5.0], [0.0]])
    top = 2**bits - 1

    rounded = NumberFormat(bits, 64, "asymmetric").round(matrix)

    for row in range(4):
        for start in (0, 64):
            values = matrix[row, start : start + 64].tolist()
            low, high = min(0.0, *values), max(0.0, *values)
            scale = float(np.float16((high - low) / top))
            zero = min(top, max(0, round(-low / scale))) if scale else 0
            for place, value in enumerate(values):
                code = min(top, max(0, round(value / scale) + zero)) if scale else zero
                assert rounded[row, start + place] == np.float32((code - zero) * scale)


def test_balanced_two_bits_have_five_levels() -> None:
    row = torch.tensor([[-2.0, -1.1, 0.2, 1.4, 2.0]])

    assert NumberFormat(2, None, "balanced").round(row).tolist() == [[-2.0, -1.0, 0.0, 1.0, 2.0]]


def test_clipping_shrinks_the_range_and_saturates() -> None:
    row = torch.tensor([[31.0, 62.0, -62.0]])

    assert NumberFormat(6, None, clip=0.5).round(row).tolist() == [[31.0, 31.0, -32.0]]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["e3m1", "e3m2"]), st.floats(-40, 40, width=16))
def test_small_floats_round_to_the_nearest_number_ties_to_even(kind: str, value: float) -> None:
    known = all_numbers(2 if kind == "e3m2" else 1)
    magnitude = min(abs(value), known[-1])
    nearest = min(range(len(known)), key=lambda code: (abs(known[code] - magnitude), code % 2))
    number = NumberFormat(6 if kind == "e3m2" else 5, None, kind)  # type: ignore[arg-type]
    row = torch.tensor([[known[-1], value]], dtype=torch.float64)
    one = Scaling(torch.ones(1, 1, dtype=torch.float16))

    assert number.snap(row, one)[0].tolist() == [known[-1], math.copysign(known[nearest], value)]


def test_the_largest_value_of_a_group_keeps_its_size() -> None:
    matrix = a_matrix(3, 256).half()

    rounded = NumberFormat(6, 128, "e3m2").round(matrix)

    largest = matrix[0, :128].abs().argmax()
    assert rounded[0, largest] == pytest.approx(float(matrix[0, largest]), rel=2**-10)
    assert not rounded[-1].any()


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "balanced", "e3m2"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_are_refused(kind: str, bad: float) -> None:
    matrix = torch.zeros(2, 64)
    matrix[1, 3] = bad

    with pytest.raises(ValueError, match="NaN or infinity"):
        NumberFormat(6, 32, kind).round(matrix)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "e3m2"])
def test_values_past_an_fp16_scale_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="FP16 scale"):
        NumberFormat(6, None, kind).round(torch.full((1, 4), 1e9))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bits", "group", "kind", "clip"),
    [
        (9, None, "symmetric", 1.0),
        (5, None, "e3m2", 1.0),
        (6, 0, "symmetric", 1.0),
        (6, None, "symmetric", 0.0),
    ],
)
def test_formats_that_make_no_sense_are_refused(
    bits: int, group: int | None, kind: str, clip: float
) -> None:
    with pytest.raises(ShapeError):
        NumberFormat(bits, group, kind, clip)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (NumberFormat(6, 128), "int6/128"),
        (NumberFormat(4, None, "asymmetric"), "uint4/row"),
        (NumberFormat(6, None, "e3m2"), "e3m2/row"),
    ],
)
def test_a_format_has_a_name(number: NumberFormat, name: str) -> None:
    assert number.name == name
