"""The CPU kernels against an integer reference that shares nothing with them."""

from __future__ import annotations

from dataclasses import replace

import operands
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat, Operand, quantize, quantize_symmetric
from flexq_bench.kernels.reference import reference_gemm
from flexq_bench.kernels.registry import resolve
from flexq_bench.workloads.gemm import GemmWorkload

ABQ_KERNELS = ("abq-w2a2", "abq-w2a8", "abq-w3a5", "abq-w6a6", "abq-w7a4", "abq-w8a8")
INTEGER_KERNELS = ("flexq-w6a6", "flexq-w6a8", "cublaslt-w8a8", *ABQ_KERNELS)
KERNELS = (
    *INTEGER_KERNELS,
    "cublas-fp16",
    "cublaslt-fp8",
    "w8a16",
    "w8a16[groups]",
    "w6a16",
    "w4a16",
    "fp6-w6a16",
    "fp6-w6a16[fine]",
    "fp5-w5a16",
    "dgq-w4a8",
    "dgq-w4a8[static]",
    "dual-w6a8",
    "group-w4a8",
    "atom-w4a4",
    "abq-w2*a8",
)


def multiply(kernel, x, w):
    out = torch.full((x.rows, w.rows), torch.nan, dtype=torch.float16)
    kernel.gemm(kernel.pack_activation(x), kernel.pack_weight(w), out)
    return out


@settings(max_examples=150, deadline=None)
@given(
    label=st.sampled_from(INTEGER_KERNELS),
    m=st.integers(1, 17),
    n=st.one_of(st.just(1), st.integers(1, 70)),
    k=st.one_of(st.just(1), st.integers(1, 400)),
    seed=st.integers(0, 2**31),
    extreme=st.sampled_from([None, "lowest", "lowest but one", "highest", "zero"]),
)
def test_integer_sums_are_exact_for_any_shape_and_extreme_codes(label, m, n, k, seed, extreme):
    kernel = operands.linear_kernel(label, "cpu")
    a, b = kernel.spec.activation, kernel.spec.weight
    x_codes = operands.random_codes(m, k, a.bits, seed=seed)
    w_codes = operands.random_codes(n, k, b.bits, seed=seed + 1)
    if extreme is not None:  # in both matrices, everywhere
        for codes, top in ((x_codes, 1 << (a.bits - 1)), (w_codes, 1 << (b.bits - 1))):
            of_top = {"lowest": -top, "lowest but one": 1 - top, "highest": top - 1, "zero": 0}
            codes.fill_(of_top[extreme])
    # 2^-8 keeps |sum| · scale under 65,504; a power of two loses nothing.
    x = operands.unit_operand(x_codes, a.bits, a.group, 2.0**-8)
    w = operands.unit_operand(w_codes, b.bits, b.group)

    out = multiply(kernel, x, w)

    expected = (operands.int_gemm(x_codes, w_codes).double() * 2.0**-8).to(torch.float16)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("label", KERNELS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 100, 300), (8, 64, 576), (17, 8, 64)])
def test_real_inputs_stay_within_fp16_of_float64(label, m, n, k):
    kernel = operands.linear_kernel(label, "cpu")
    generator = torch.Generator().manual_seed(m + n + k)
    x = kernel.quantize_activation(torch.randn(m, k, generator=generator).half())
    w = kernel.quantize_weight(torch.randn(n, k, generator=generator).half() * 0.02)

    out = multiply(kernel, x, w)

    reference = reference_gemm(x, w)
    scale = torch.maximum(reference.y.abs(), reference.magnitude * 2.0**-10).clamp(min=2.0**-14)
    assert ((out.double() - reference.y).abs() / scale).max() <= 1e-3


@pytest.mark.parametrize("label", KERNELS)
def test_linear_is_quantization_and_gemm(label):
    kernel = operands.linear_kernel(label, "cpu")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 200, generator=generator).half()
    w = kernel.pack_weight(kernel.quantize_weight(torch.randn(9, 200, generator=generator).half()))
    out, expected = torch.empty(5, 9).half(), torch.empty(5, 9).half()

    kernel.linear(x, kernel.empty_activation(5, 200, x.device), w, out)
    kernel.gemm(kernel.pack_activation(kernel.quantize_activation(x)), w, expected)

    assert torch.equal(out, expected)


@pytest.mark.parametrize("label", KERNELS)
def test_bias_is_added_to_every_token(label):
    kernel = operands.linear_kernel(label, "cpu")
    x, w = torch.zeros(2, 64).half(), torch.zeros(3, 64).half()
    bias = torch.tensor([1.0, -2.0, 0.5]).half()
    out = torch.empty(2, 3).half()

    kernel.gemm(
        kernel.pack_activation(kernel.quantize_activation(x)),
        kernel.pack_weight(kernel.quantize_weight(w)),
        out,
        bias=bias,
    )

    assert torch.equal(out, bias.expand(2, 3))


@pytest.mark.parametrize("label", KERNELS)
def test_operands_of_different_k_are_refused(label):
    kernel = operands.linear_kernel(label, "cpu")
    x = kernel.pack_activation(kernel.quantize_activation(torch.ones(1, 64).half()))
    w = kernel.pack_weight(kernel.quantize_weight(torch.ones(4, 65).half()))

    with pytest.raises(ShapeError, match="K=64"):
        kernel.gemm(x, w, torch.empty(1, 4).half())


def test_reference_is_the_sum_over_scaled_groups():
    x = operands.unit_operand(operands.random_codes(4, 300, 6, seed=1), 6, 128)
    w = operands.unit_operand(operands.random_codes(5, 300, 6, seed=2), 6, 128)

    whole = reference_gemm(x, w).y
    of_groups = []
    for group in range(3):
        only = replace(w, scales=torch.zeros(5, 3, dtype=torch.float16))
        only.scales[:, group] = 1
        of_groups.append(reference_gemm(x, only).y)
        k = slice(128 * group, 128 * (group + 1))
        expected = operands.int_gemm(x.values[:, k], w.values[:, k])
        assert torch.equal(of_groups[-1], expected.double())

    assert torch.equal(sum(of_groups), whole)
    assert torch.equal(whole, operands.int_gemm(x.values, w.values).double())


def test_fp8_sums_have_tolerance_of_terms_and_fewer_bits():
    fp8 = NumberFormat(8, kind="float")
    x = quantize(torch.tensor([[448.0, 448.0]]).half(), fp8)
    w = quantize(torch.tensor([[448.0, -448.0]]).half(), fp8)
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


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
def test_the_read_probe_reads_every_byte(bits):
    probe = resolve(f"read-{bits}", "cpu")
    assert not isinstance(probe, LinearKernel)
    gemm = GemmWorkload(1, 64, 300)
    operand = probe.allocate(gemm, torch.device("cpu"), seed=1)

    assert probe.check(operand).exact
    assert operand.buffers["words"].nbytes >= gemm.weight_bytes(bits, probe.spec.weight.group)
