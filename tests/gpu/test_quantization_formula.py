"""FlexQ's quantization formula on a GPU against the reference on a CPU, bit for bit.

Triton's copies (activations, training) and the one of csrc/quantize.cuh, which packing kernels use.
"""

from __future__ import annotations

import math

import operands
import pytest
import torch
from edge_cases import EDGE_CASES

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.formats import NumberFormat, Operand, fused_rounding, quantize_symmetric
from flexq_bench.kernels.formats.mixed import default_order
from flexq_bench.kernels.registry import resolve
from flexq_bench.schemes.straight_through import fake_quantize
from flexq_bench.schemes.training_kernels import kernels_for

FORMATS = [
    NumberFormat(6, 128),
    NumberFormat(8, 128),
    NumberFormat(4, 32, clip=0.9),
    NumberFormat(6, 100),
    NumberFormat(8),
    NumberFormat(3, None, "balanced"),
]

SYMMETRIC = [
    NumberFormat.parse(name)
    for name in ("int2/row", "int3/100", "int4/128", "int6/128", "int6/row", "int8/128", "int8/row")
]
# Every source that includes quantize.cuh, but for those that tests/gpu/test_decode_operations.py
# holds against `activate`.
PACKING = [
    "flexq-w6a6",
    "flexq-w6a8",
    "flexq-imma-w6a6",
    "flexq-imma-w6a8",
    "atom-w4a4",
    "cublaslt-w8a8",
    "group-w4a8",
    *(f"abq-w6a{bits}" for bits in range(2, 9)),
]
# Of the identity that activations are multiplied by, so that FP16 holds each code times its scale.
IDENTITY_SCALE = {
    "subnormal values": 2.0**12,
    "subnormal scales": 2.0**12,
    "largest values": 2.0**-4,
}
every_case = pytest.mark.parametrize("case", EDGE_CASES)
every_format = pytest.mark.parametrize("number", SYMMETRIC, ids=lambda number: number.name)


def identity(kernel: LinearKernel, k: int, scale: float) -> Operand:
    """Weights [K, K] of a kernel that are `scale` times the identity, exactly."""
    number, codes = kernel.spec.weight, torch.eye(k, dtype=torch.int8)
    if number.kind != "mixed":
        return operands.unit_operand(codes, number.bits, number.group, scale)
    order = default_order(k)
    groups = -(-k // number.group)
    scales = torch.full((k, groups), scale, dtype=torch.float16)
    return Operand(codes[:, order.long()], scales, 4, number.group, tail_bits=8, order=order)


@every_case
@every_format
def test_triton_rounds_activations_as_the_reference(case, number):
    matrix = EDGE_CASES[case]
    assert fused_rounding.supports(matrix.cuda())

    rounded = number.round(matrix.cuda())

    expected = quantize_symmetric(matrix, number.bits, number.group).dequantize()
    assert torch.equal(rounded.cpu().double(), expected)


@every_case
@every_format
def test_triton_rounds_in_training_as_the_reference(case, number):
    matrix = EDGE_CASES[case]
    assert kernels_for(matrix.float().cuda()) is not None

    rounded = fake_quantize(matrix.float().cuda(), number)

    expected = quantize_symmetric(matrix, number.bits, number.group).dequantize()
    assert torch.equal(rounded.cpu().double(), expected)


@every_case
@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_reference_gives_the_same_codes_on_a_gpu(case, number, dtype):
    matrix = EDGE_CASES[case].to(dtype)

    quantized = quantize_symmetric(matrix.cuda(), number.bits, number.group).to("cpu")

    expected = quantize_symmetric(matrix, number.bits, number.group)
    assert torch.equal(quantized.values, expected.values)
    assert torch.equal(quantized.scales, expected.scales)


@every_case
@pytest.mark.parametrize("label", PACKING)
def test_kernels_pack_the_codes_and_scales_of_the_reference(label, case):
    kernel, x = resolve(label, "cuda"), EDGE_CASES[case]
    try:
        kernel.spec.check_capability(torch.cuda.get_device_capability())
    except UnsupportedError as error:
        pytest.skip(str(error))
    m, k = x.shape
    scale = IDENTITY_SCALE.get(case, 1.0)
    packed = kernel.empty_activation(m, k, torch.device("cuda"))
    weight = kernel.pack_weight(identity(kernel, k, scale).to("cuda"))
    out = torch.full((m, k), torch.nan, dtype=torch.float16, device="cuda")

    kernel.activate(x.cuda(), packed)
    kernel.gemm(packed, weight, out)

    expected = (kernel.quantize_activation(x).in_own_order() * scale).half()
    if kernel.spec.weight.kind == "mixed":
        # Codes of 8 bits are sums of two tiles that cancel, each of which FP32 may round: next to a
        # tie that is one unit of FP16. A code that is off by one is off by 2^-7 at least.
        torch.testing.assert_close(out.cpu(), expected, rtol=2.0**-10, atol=0.0)
    else:
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("number", FORMATS, ids=lambda number: number.name)
@pytest.mark.parametrize(("rows", "k"), [(1, 64), (3, 576), (17, 1536), (2048, 300), (5, 8192)])
def test_numbers_equal_their_definition(number, rows, k):
    generator = torch.Generator().manual_seed(rows + k)
    x = torch.randn(rows, k, generator=generator)
    x[0] = 0
    x[-1] *= 1e-7  # scales that FP16 has few bits for, or none
    x[rows // 2, ::7] *= 300
    x = x.half()
    assert torch.cuda.is_available()
    assert fused_rounding.supports(x.cuda())
    assert torch.equal(number.round(x.cuda()).cpu(), number.round(x))


def test_part_of_a_matrix_is_rounded_like_its_copy():
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(0)).half()
    number = NumberFormat(4, 128)
    assert torch.equal(number.round(x.cuda()[:, 100:400]).cpu(), number.round(x[:, 100:400]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad):
    x = torch.ones(4, 256, dtype=torch.float16, device="cuda")
    x[2, 200] = bad
    with pytest.raises(ValueError, match="cannot quantize NaN or infinity"):
        NumberFormat(6, 128).round(x)
