"""FlexQ's quantization formula: the reference against the paper, every path on a CPU against it.

tests/gpu/test_quantization_formula.py has the paths on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import operands
import pytest
import torch
from edge_cases import EDGE_CASES

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import (
    NumberFormat,
    assembled,
    quantize,
    quantize_symmetric,
)
from flexq_bench.schemes.activations import DynamicActivation
from flexq_bench.schemes.straight_through import fake_quantize

FORMATS = [
    NumberFormat.parse(name)
    for name in ("int2/row", "int3/100", "int4/128", "int6/128", "int6/row", "int8/128", "int8/row")
]
every_case = pytest.mark.parametrize("case", EDGE_CASES)
every_format = pytest.mark.parametrize("number", FORMATS, ids=lambda number: number.name)


def by_columns(matrix, number):
    """Quantized as GPTQ and AWQ do, a group of columns at a time."""
    codes, scalings = [], []
    for group in number.columns(matrix.shape[1]):
        block = matrix[:, group.start : group.end].double()
        scalings.append(group.format.fit(block))
        codes.append(group.format.rounder(scalings[-1], block.dtype).codes(block))
    return assembled(torch.cat(codes, dim=1), scalings, number)


# What each returns is code times scale.
PATHS: dict[str, Callable[[torch.Tensor, NumberFormat], torch.Tensor]] = {
    "NumberFormat.round": lambda x, number: number.round(x),
    "activations of schemes": lambda x, number: DynamicActivation(number)(x),
    "quantize": lambda x, number: quantize(x, number).dequantize(torch.float32),
    "column by column": lambda x, number: by_columns(x, number).dequantize(torch.float32),
    "straight through, FP32": lambda x, number: fake_quantize(x.float(), number),
    "straight through, FP64": lambda x, number: fake_quantize(x.double(), number),
    "straight through, all of the range": lambda x, number: fake_quantize(
        x.float(), number, torch.ones(x.shape[0], -(-x.shape[1] // (number.group or x.shape[1])))
    ),
}
# Kernels that quantize activations to the formats of FORMATS.
KERNELS = {
    "int6/128": "flexq-w6a6",
    "int8/128": "flexq-w6a8",
    "int2/row": "abq-w6a2",
    "int6/row": "abq-w6a6",
    "int8/row": "cublaslt-w8a8",
}


def by_the_paper(row, number):
    """Codes and scales of one row, one value at a time in double precision."""
    top = 2 ** (number.bits - 1) - 1
    length = number.group or len(row)
    codes: list[int] = []
    scales: list[np.float16] = []
    for start in range(0, len(row), length):
        values = row[start : start + length]
        scale = np.float16(max(abs(value) for value in values) / top)
        scales.append(scale)
        for value in values:
            quotient = 0.0 if scale == 0 else value / float(scale)
            codes.append(max(-top - 1, min(top, round(quotient))))  # round: half to even
    return codes, scales


@every_case
@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_reference_is_the_papers_formula(case, number, dtype):
    matrix = EDGE_CASES[case].to(dtype)

    quantized = quantize_symmetric(matrix, number.bits, number.group)

    for row in range(matrix.shape[0]):
        codes, scales = by_the_paper(matrix[row].tolist(), number)
        assert quantized.values[row].tolist() == codes
        assert quantized.scales[row].tolist() == [float(scale) for scale in scales]


@pytest.mark.parametrize(("bits", "group"), [(1, 128), (9, 128), (6, 0)])
def test_invalid_bits_and_groups_are_refused(bits, group):
    with pytest.raises(ShapeError):
        quantize_symmetric(torch.ones(1, 4), bits, group)


@every_case
@every_format
@pytest.mark.parametrize("path", PATHS)
def test_every_path_rounds_as_the_reference(path, case, number):
    matrix = EDGE_CASES[case]

    rounded = PATHS[path](matrix, number)

    expected = quantize_symmetric(matrix, number.bits, number.group).dequantize()
    assert torch.equal(rounded.double(), expected)


@every_case
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_quantize_activations_as_the_reference(name, case):
    kernel, number = operands.linear_kernel(KERNELS[name], "cpu"), NumberFormat.parse(name)

    quantized = kernel.quantize_activation(EDGE_CASES[case])

    expected = quantize_symmetric(EDGE_CASES[case], number.bits, number.group)
    assert torch.equal(quantized.values, expected.values)
    assert torch.equal(quantized.scales, expected.scales)


@pytest.mark.parametrize("share", [0.9, 0.5])
@every_case
def test_clipping_is_equal_in_training_and_evaluation(case, share):
    matrix, number = EDGE_CASES[case].double(), NumberFormat(4, 100, clip=share)
    groups = -(-matrix.shape[1] // 100)
    learned = torch.full((matrix.shape[0], groups), share, dtype=torch.float64)

    trained = fake_quantize(matrix, NumberFormat(4, 100), learned)

    assert torch.equal(trained.float(), number.round(matrix))
    assert torch.equal(fake_quantize(matrix, number).float(), number.round(matrix))


@pytest.mark.parametrize("path", ["NumberFormat.round", "activations of schemes"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_format
def test_what_is_not_finite_is_refused(path, bad, number):
    matrix = EDGE_CASES["many decades"].clone()
    matrix[3, 299] = bad

    with pytest.raises(ValueError, match="cannot quantize NaN or infinity"):
        quantize_symmetric(matrix, number.bits, number.group)
    with pytest.raises(ValueError, match="cannot quantize NaN or infinity"):
        PATHS[path](matrix, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_scale_past_fp16_is_refused(dtype, share):
    top = 31
    fits = torch.tensor([[65504.0 * top, -1.0]], dtype=dtype)

    assert quantize_symmetric(fits, 6, None).values.tolist() == [[top, 0]]
    with pytest.raises(ValueError, match="do not fit an FP16 scale with codes to 31"):
        quantize_symmetric(fits * 1.001, 6, None)
    with pytest.raises(ValueError, match="do not fit an FP16 scale with codes to 31"):
        NumberFormat(6, clip=share).round(fits * 1.001 / share)
