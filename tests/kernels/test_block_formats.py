"""Scales of blocks, matrices and powers of two, against other implementations of their formats."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import FLOAT_TYPES, NumberFormat, format_of, quantize
from flexq_bench.kernels.reference import reference_gemm

ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
MX = {
    "mxfp4": "e2m1",
    "mxfp6-e2m3": "e2m3",
    "mxfp6-e3m2": "e3m2",
    "mxfp8": "e4m3",
    "mxfp8-e5m2": "e5m2",
}
NAMES = [
    *("int6/128", "uint4/row", "balanced3/row", "fp5/128", "fp6/row", "fp8/row", "fp16"),
    *("fp8/tensor", "fp8/128", "fp8/128x128", "fp8-e5m2/64", "int8/tensor", "int8/128x128"),
    *("fp6-e2m3/32@bf16", "int4/32@bf16", "fp4/16", *MX, "nvfp4"),
]


def random_matrix(rows=70, k=200, *, seed=0, dtype=torch.float32):
    """Values whose magnitudes span 40 powers of two."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, k, generator=generator)
    return (values * torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator))).to(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_parsed_to_the_format_that_has_them(name):
    assert NumberFormat.parse(name).name == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mxfp6", "mxfp6-e2m3, mxfp6-e3m2"),
        ("fp8-e2m1/row", "no float of 8 bits is 'e2m1'"),
        ("int6/128@e9m9", "no scale type 'e9m9'"),
        ("uint4/tensor", "fp32 scales of rows or groups"),
        ("int6/0", "at least one value"),
    ],
)
def test_unknown_formats_are_refused_with_the_reason(name, reason):
    with pytest.raises(ShapeError, match=reason):
        NumberFormat.parse(name)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_code_has_the_number_of_the_standard(name):
    kind, other = FLOAT_TYPES[name], ML_DTYPES[name]
    codes = np.arange(1 << kind.bits, dtype=np.uint8)
    theirs = torch.from_numpy(codes.view(other).astype(np.float64))
    theirs[theirs.isinf()] = torch.nan

    numbers = kind.numbers()

    torch.testing.assert_close(numbers, theirs, rtol=0, atol=0, equal_nan=True)
    finite = numbers.isfinite()
    assert torch.equal(kind.codes(numbers[finite]), torch.arange(1 << kind.bits)[finite])
    assert kind.largest == float(ml_dtypes.finfo(other).max)
    assert 2.0**kind.max_exponent <= kind.largest < 2.0 ** (kind.max_exponent + 1)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_values_round_to_nearest_with_ties_to_even(name):
    kind = FLOAT_TYPES[name]
    numbers = kind.numbers()
    ordered = numbers[numbers.isfinite()].unique()
    ties = (ordered[1:] + ordered[:-1]) / 2
    near = torch.cat([ties, ties * (1 + 2.0**-20), ties * (1 - 2.0**-20), ordered])

    theirs = near.float().numpy().astype(ML_DTYPES[name]).astype(np.float64)

    assert torch.equal(kind.nearest(near.float()), torch.from_numpy(theirs))
    assert float(kind.nearest(torch.tensor(1e9))) == kind.largest


@pytest.mark.parametrize("name", MX)
def test_every_code_times_power_of_two_is_fixed_point(name):
    kind = FLOAT_TYPES[MX[name]]
    numbers = kind.numbers()
    numbers = numbers[numbers.isfinite()]
    exponents = torch.arange(-127, 128)
    # The largest number in each block fixes its scale.
    blocks = numbers[:, None].expand(-1, 32).clone()
    blocks[:, 0] = kind.largest
    values = (blocks[None] * torch.exp2(exponents.double())[:, None, None]).reshape(-1, 32)

    operand = quantize(values, NumberFormat.parse(name))

    assert torch.equal(operand.dequantize(), values)
    stored = operand.scales.view(torch.uint8)[:, 0].view(len(exponents), -1)
    assert torch.equal(stored, (exponents + 127).to(torch.uint8)[:, None].expand_as(stored))


@pytest.mark.parametrize("name", MX)
def test_mx_scales_are_largest_power_of_two_below_block(name):
    matrix = random_matrix(k=96)
    kind = FLOAT_TYPES[MX[name]]
    largest = matrix.view(70, 3, 32).abs().amax(-1).double()
    scales = torch.exp2(largest.log2().floor() - kind.max_exponent)

    operand = quantize(matrix, NumberFormat.parse(name))

    theirs = ml_dtypes.float8_e8m0fnu
    assert torch.equal(operand.scales.double(), scales)
    assert torch.equal(
        operand.scales.view(torch.uint8),
        torch.from_numpy(scales.numpy().astype(np.float32).astype(theirs).view(np.uint8)),
    )
    quotients = (matrix.double().view(70, 3, 32) / scales[..., None]).clamp(
        -kind.largest, kind.largest
    )
    codes = quotients.float().numpy().astype(ML_DTYPES[kind.name]).astype(np.float64)
    assert torch.equal(operand.values.double().view(70, 3, 32), torch.from_numpy(codes))


def compressed(matrix, **options):
    """What compressed-tensors rounds a matrix to, from its own scales."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = QuantizationArgs(num_bits=options.pop("bits"), type="float", **options)
    low, high = matrix.min(), matrix.max()
    shared, scale_of = None, None
    if arguments.strategy == "tensor_group":
        shared = generate_gparam(low, high)
    size = arguments.group_size or matrix.shape[1]
    if arguments.strategy == "block":
        rows, columns = arguments.block_structure
        blocks = matrix.view(matrix.shape[0] // rows, rows, -1, columns).transpose(1, 2)
        low, high = blocks.amin((2, 3)), blocks.amax((2, 3))
    elif arguments.strategy != "tensor":
        grouped = matrix.view(matrix.shape[0], -1, size)
        low, high = grouped.amin(-1), grouped.amax(-1)
    scale_of, zeros = calculate_qparams(low, high, arguments, global_scale=shared)
    return fake_quantize(matrix, scale_of, zeros, arguments, global_scale=shared), scale_of


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nvfp4", {"bits": 4, "strategy": "tensor_group", "group_size": 16,
                   "scale_dtype": torch.float8_e4m3fn}),
        ("fp8/128x128", {"bits": 8, "strategy": "block", "block_structure": [128, 128]}),
        ("fp8/tensor", {"bits": 8, "strategy": "tensor"}),
    ],
)  # fmt: skip
def test_scales_and_codes_equal_compressed_tensors(name, options):
    matrix = random_matrix(256, 256)
    theirs, their_scales = compressed(matrix, **options)

    operand = quantize(matrix, NumberFormat.parse(name))

    ours = operand.dequantize()
    # They divide in FP32, twice where a matrix has a scale, so that quotients near a tie differ.
    differ = ~torch.isclose(ours.float(), theirs, rtol=1e-5, atol=0)
    assert float(differ.float().mean()) < 1e-3
    if name == "nvfp4":
        kept = operand.scales.float() > 0  # theirs are at least 1/8, for values that round to zero
        same = operand.scales.float()[kept] == their_scales.float()[kept]
        assert float(same.float().mean()) > 0.999


def test_blocks_share_the_scale_of_their_largest_value():
    matrix = torch.ones(130, 300)
    matrix[129, 299] = 448.0

    operand = quantize(matrix, NumberFormat.parse("fp8/128x128"))

    expected = torch.full((130, 3), 1 / 448)
    expected[128:, 2] = 1.0
    assert torch.equal(operand.scales, expected)
    assert format_of(operand.slice_rows(5, 7)).name == "fp8/128x128"
    assert torch.equal(operand.slice_rows(128, 130).dequantize(), operand.dequantize()[128:])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("fp16", "balanced3/row")])
def test_rounding_and_operands_agree_and_keep_zeros(name):
    number = NumberFormat.parse(name)
    matrix = random_matrix()
    matrix[:3] = 0

    operand = quantize(matrix, number)

    assert format_of(operand) == number
    assert torch.equal(number.round(matrix), operand.dequantize().float())
    assert torch.equal(operand.dequantize()[:3], torch.zeros(3, 200).double())
    assert bool(torch.isfinite(operand.dequantize()).all())


def test_matrices_of_zeros_have_codes_of_zero():
    for name in NAMES[2:]:
        number = NumberFormat.parse(name)
        if not number.is_dense:
            assert float(quantize(torch.zeros(3, 40), number).dequantize().abs().max()) == 0, name


def test_values_that_are_not_finite_are_refused():
    for bad in (float("nan"), float("inf")):
        matrix = torch.ones(2, 64)
        matrix[1, 5] = bad
        for name in ("mxfp4", "nvfp4", "fp8/128x128", "fp8/tensor"):
            with pytest.raises(ValueError, match="NaN or infinity"):
                quantize(matrix, NumberFormat.parse(name))


def test_reference_takes_groups_of_which_one_divides_the_other():
    x, w = random_matrix(3, 256, seed=1), random_matrix(5, 256, seed=2)
    coarse, fine = quantize(x, NumberFormat(8, 128)), quantize(w, NumberFormat(4, 32))

    reference = reference_gemm(coarse, fine)

    assert torch.allclose(reference.y, coarse.dequantize() @ fine.dequantize().T, rtol=1e-12)
    with pytest.raises(ShapeError, match="groups of 48 and w of 32"):
        reference_gemm(quantize(x, NumberFormat(8, 48)), fine)
