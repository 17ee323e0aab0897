"""Correctness check: error rules, overflow, and inputs with an exact result."""

from __future__ import annotations

import math

import pytest
import torch

from flexq_bench.api import linear_kernel
from flexq_bench.kernels import registry
from flexq_bench.kernels.reference import Reference, reference_gemm
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.check import CheckResult, check_linear, judge_error, relative_error
from flexq_bench.measure.inputs import full_range_inputs, realistic_inputs, small_sum_inputs
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

CPU = torch.device("cpu")


def a_reference(values, magnitudes=None):
    y = torch.tensor([values], dtype=torch.float64)
    m = y.abs() if magnitudes is None else torch.tensor([magnitudes], dtype=torch.float64)
    return Reference(y, m)


def bound(kernel, *sizes, stage="gemm"):
    return BoundKernel(
        kernel, kernel.spec, Case(kernel.spec.name, GemmWorkload(*sizes), stage=stage), CPU
    )


def half(*values):
    return torch.tensor([values], dtype=torch.float16)


def test_the_error_is_relative_to_the_reference():
    error = relative_error(half(1.01), a_reference([1.0]))

    assert float(error) == pytest.approx(0.01, rel=0.05)


def test_error_of_a_cancelled_element_is_relative_to_its_terms():
    error = relative_error(half(0.002), a_reference([0.001], [1024.0]))

    assert float(error) == pytest.approx(0.001, rel=0.01)


def test_sums_of_fewer_bits_tolerate_more_cancellation():
    fp32, fp8 = a_reference([0.001], [1.0]), a_reference([0.001], [1.0])
    fp8 = Reference(fp8.y, fp8.magnitude, sum_bits=14)

    ratio = relative_error(half(0.002), fp32) / relative_error(half(0.002), fp8)

    assert float(ratio) == pytest.approx(2.0**10, rel=0.03)


def test_error_below_the_normal_range_is_relative_to_its_edge():
    error = relative_error(half(2.0**-20), a_reference([0.0]))

    assert float(error) == 2.0**-6


@pytest.mark.parametrize(
    ("y", "reference", "right"),
    [
        (math.inf, 70000.0, True),
        (-math.inf, -70000.0, True),
        (-math.inf, 70000.0, False),
        (65504.0, 70000.0, False),
        (65504.0, 65510.0, True),
        (math.inf, 65510.0, True),
        (math.inf, 60000.0, False),
        (math.nan, 70000.0, False),
        (math.nan, 1.0, False),
    ],
)
def test_infinity_of_the_same_sign_is_right_beyond_fp16(y, reference, right):
    assert judge_error(half(y), a_reference([reference]), 1e-3).is_correct is right


def test_first_wrong_element_is_reported_with_the_expected_value():
    result = judge_error(half(1.0, 5.0, 7.0), a_reference([1.0, 2.0, 3.0]), 1e-3)

    assert "2 of 3 elements wrong, first y[0,1] = 5, expected 2" in result.detail


def test_wrong_integers_are_shown_whole_and_without_an_error():
    y = torch.tensor(16777219, dtype=torch.float64)
    reference = Reference(y, torch.tensor(0.0), slack=0.25)

    result = judge_error(torch.tensor(16777217), reference, 1e-3, "total")

    assert result.detail == "1 of 1 elements wrong, first total = 16777217, expected 16777219"


def test_merged_checks_keep_the_worse_result():
    right, wrong = CheckResult(1e-4, True), CheckResult(0.5, False, "wrong")

    assert right.merged(wrong) == wrong.merged(right) == wrong
    assert right.merged(CheckResult(None, None)) == right


@pytest.mark.parametrize("stage", ["gemm", "linear"])
@pytest.mark.parametrize("label", ["flexq-w6a6", "flexq-w6a8", "cublaslt-w8a8"])
@pytest.mark.parametrize("k", [64, 576, 4096])
def test_exact_inputs_stay_exact_in_fp32_and_within_fp16(label, stage, k):
    kernel = registry.resolve(label, "cpu")

    inputs = full_range_inputs(bound(kernel, 3, 16, k, stage=stage), 1)
    reference = reference_gemm(inputs.x, inputs.w)

    quantum = inputs.x.scales.double().min() * inputs.w.scales.double().min()
    assert float(reference.magnitude.max() / quantum) < 2**24
    assert bool((reference.y / quantum == (reference.y / quantum).round()).all())
    assert bool(reference.y.half().isfinite().all())


def test_full_range_inputs_have_the_extremes_and_zero():
    kernel = registry.resolve("flexq-w6a8", "cpu")

    inputs = full_range_inputs(bound(kernel, 4, 64, 512), 1)

    assert {-32, 31, 0} <= set(inputs.w.values.unique().tolist())
    assert {-128, 127, 0} <= set(inputs.x.values.unique().tolist())
    assert len(inputs.w.scales.unique()) > 1


def test_small_sums_are_fp16_integers():
    kernel = registry.resolve("flexq-w6a6", "cpu")

    inputs = small_sum_inputs(bound(kernel, 4, 64, 8192), 1)
    y = reference_gemm(inputs.x, inputs.w).y

    assert float(y.abs().max()) <= 2048
    assert bool((y == y.round()).all())
    assert bool((y != 0).any())


def test_all_kernels_get_equal_real_values_for_a_seed():
    gemm = GemmWorkload(4, 32, 256)
    w6, fp16 = (registry.resolve(label, "cpu") for label in ("flexq-w6a6", "cublas-fp16"))

    ours, dense = (realistic_inputs(kernel, gemm, CPU, 3) for kernel in (w6, fp16))

    assert torch.equal(ours.x_real, dense.x_real)
    assert torch.allclose(ours.w.dequantize(), dense.w.dequantize(), atol=0.02 * 4 / 31)


def test_realistic_activations_have_outlier_channels():
    kernel = registry.resolve("cublas-fp16", "cpu")

    x = realistic_inputs(kernel, GemmWorkload(64, 8, 4096), CPU, 0).x_real

    loud = (x.float().std(dim=0) > 8).sum()
    assert int(loud) == 4  # 0.1 % of 4,096


def test_dense_results_near_zero_tolerate_cancellation():
    kernel = registry.resolve("cublas-fp16", "cpu")
    inputs = realistic_inputs(kernel, GemmWorkload(16, 512, 1024), CPU, 0)
    reference = reference_gemm(inputs.x, inputs.w)

    y = (inputs.x.values.float() @ inputs.w.values.float().T).half()

    assert judge_error(y, reference, 1e-3).is_correct


@linear_kernel("float-w6a8", weight="int6/128", activation="int8/128", backends=["cpu"])
def float_w6a8(x_codes, x_scales, w_codes, w_scales, out):
    """Dequantizes both operands to FP32 first."""
    x, w = (
        codes * scales.float().repeat_interleave(128, 1)
        for codes, scales in ((x_codes, x_scales), (w_codes, w_scales))
    )
    out.copy_(x @ w.T)


# By these seeds products cancel within both groups of an element, but for FP32's rounding.
@pytest.mark.parametrize("seed", [38, 44, 67, 139])
def test_function_may_round_cancelled_products_of_a_group(seed):
    (kernel,) = float_w6a8.kernels()

    def run(inputs, out):
        kernel.gemm(kernel.pack_activation(inputs.x), kernel.pack_weight(inputs.w), out)

    result = check_linear(bound(kernel, 64, 64, 256), run, seed=seed, tolerance=1e-3)

    assert result == CheckResult(result.max_rel_error, exact=True)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_output_has_an_infinite_error(value):
    result = judge_error(half(1.0, value), a_reference([1.0, 1.0]), 1e-3)

    assert result.max_rel_error == math.inf
    assert "1 of 2 elements wrong" in result.detail
