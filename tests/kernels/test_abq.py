"""The arbitrary-bit CUDA kernel as far as a machine without a GPU can tell."""

from __future__ import annotations

from itertools import product

import operands
import pytest
import torch

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.registry import resolve
from flexq_bench.workloads.gemm import GemmWorkload

GEMM = GemmWorkload(1, 4096, 4096)


def defines_of(label, gemm=GEMM):
    *_, main = operands.linear_kernel(label, "cuda").builds_for(gemm, None)
    return dict(main.defines)


def test_abq_label_states_bits_with_row_scales():
    for w_bits, a_bits in product(range(2, 9), repeat=2):
        label = f"abq-w{w_bits}a{a_bits}"
        spec, defines = resolve(label, "cuda").spec, defines_of(label)
        assert (spec.weight.bits, spec.weight.group) == (w_bits, None)
        assert (spec.activation.bits, spec.activation.group) == (a_bits, None)
        assert (defines["W_BITS"], defines["A_BITS"]) == (w_bits, a_bits)


@pytest.mark.parametrize(("label", "longest"), [("abq-w8a8", 131_071), ("abq-w6a6", 2_097_151)])
def test_k_that_could_overflow_int32_is_refused(label, longest):
    kernel, device = operands.linear_kernel(label, "cuda"), torch.device("cpu")
    product = 4 ** (kernel.spec.weight.bits - 1)

    kernel.empty_activation(1, longest, device)
    with pytest.raises(ShapeError, match=f"at most {longest:,}, got {longest + 1:,}"):
        kernel.empty_activation(1, longest + 1, device)

    assert longest * product < 2**31 <= (longest + 1) * product


@pytest.mark.parametrize("kernel", ["abq-w6a6", "abq-w2a8"])
def test_each_step_of_the_ablation_adds_one_thing(kernel):
    steps = ["native", "+pipeline", "+gemv-elimination", "+auto-search"]

    defines = [defines_of(f"{kernel}[{step}]") for step in steps]

    assert [d["STAGES"] > 1 for d in defines] == [False, True, True, True]
    assert [d["FILL"] for d in defines] == [0, 0, 1, 1]
    assert [d["TOKENS"] for d in defines] == [8, 8, 1, 1]
    assert defines[3] == defines_of(kernel)
