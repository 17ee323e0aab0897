"""Checks of kernel outputs: relative error in float64, bitwise equality where required."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from flexq_bench.kernels.reference import BF16_BITS, FP16_BITS, Reference, reference_of
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.inputs import (
    LinearInputs,
    derive_seed,
    full_range_inputs,
    real_weight,
    realistic_inputs,
    small_sum_inputs,
    weight_seed,
)
from flexq_bench.measure.own_quantization import has_own_rule, own_quantization_error

_OVERFLOW = 65536 / 65504  # of FP16; its numbers lie closest to infinity
FP16_SMALLEST_NORMAL = 2.0**-14
# An element far smaller than its terms is compared relative to the terms: 2^-10 of them for sums of
# 24 bits, and more for sums of fewer bits.
CANCELLATION = 2.0**-10
_FP32_BITS = 24
FP32_INTEGERS = 2.0**24  # FP32 represents every integer up to this one
_DENSITIES = (1.0, 0.25, 0.05, 0.01)

# run(inputs, out [M,N]) -> the output, if the kernel allocated it itself
Run = Callable[[LinearInputs, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check. detail: description of the error; empty: none.

    exact: True if integer results equal the reference bit for bit; None: not an integer kernel.
    """

    max_rel_error: float | None
    exact: bool | None
    detail: str = ""

    @property
    def is_correct(self) -> bool:
        return not self.detail

    def merged(self, other: CheckResult) -> CheckResult:
        """The worse of two checks of one kernel."""
        errors = [e for e in (self.max_rel_error, other.max_rel_error) if e is not None]
        exacts = [e for e in (self.exact, other.exact) if e is not None]
        # max() would ignore a NaN in second place.
        worst = max(errors, key=lambda e: math.inf if math.isnan(e) else e) if errors else None
        return CheckResult(worst, all(exacts) if exacts else None, self.detail or other.detail)


def check_linear(bound: BoundKernel, run: Run, *, seed: int, tolerance: float) -> CheckResult:
    """Check one configuration of a kernel on inputs drawn from `seed`.

    Realistic inputs must be within `tolerance` of float64 (see relative_error), and quantized by
    the kernel's own rule little worse than by its formats' (own_quantization). A kernel with
    integer weights and activations must also give float16(reference) bit for bit on codes over
    their full range and on small ones, with scales that keep every FP32 sum exact.
    """
    kernel, spec, gemm, device = bound.kernel, bound.spec, bound.gemm, bound.device
    drawn = derive_seed(seed, "realistic")
    inputs = realistic_inputs(kernel, gemm, device, drawn)
    if has_own_rule(kernel):
        w_real = real_weight(gemm.n, gemm.k, device, weight_seed(drawn))
        rows = derive_seed(drawn, "rows")
        if error := own_quantization_error(kernel, inputs, w_real, rows):
            return CheckResult(None, None, error)
        del w_real
    reference = reference_of(spec, inputs.x, inputs.w)
    y = _run_poisoned(run, inputs, bound)
    result = judge_error(y, reference, tolerance)
    if not result.is_correct and spec.is_external and spec.rounds_to is None:
        hint = _rounding_hint(y, reference, tolerance)
        result = replace(result, detail=f"{result.detail}{hint}")
    is_integer = spec.weight.is_integer and spec.activation.is_integer
    if spec.rounds_to is not None or not is_integer:
        return result
    del inputs, reference, y
    for inputs, reference in _exact_cases(bound, seed):
        y = _run_poisoned(run, inputs, bound)
        result = result.merged(_judge_exact(y, reference))
    return result


def relative_error(y: torch.Tensor, reference: Reference) -> torch.Tensor:
    """|y - ref| / max(2^(11 - output_bits) · |ref|, 2^-14, 2^(14 - sum_bits) · magnitude), [M,N].

    2^-14 is the smallest normal FP16 number; output_bits is 11 for FP16 and FP32, 8 for BF16.
    magnitude is the sum of |contribution|, so that an element with cancellation is compared
    relative to its terms. sum_bits is 24, and fewer for FP8 and for many products of floats. If ref
    is beyond the output's range, an infinity of the same sign is correct (error 0). NaN in y gives
    NaN or infinity.
    """
    y = y.double()
    cancellation = CANCELLATION * 2.0 ** (_FP32_BITS - reference.sum_bits)
    output = 2.0 ** (FP16_BITS - reference.output_bits) * reference.y.abs()
    scale = torch.maximum(
        output.clamp(min=FP16_SMALLEST_NORMAL), cancellation * reference.magnitude
    )
    error = ((y - reference.y).abs() - reference.slack).clamp(min=0) / scale
    overflows = reference.y.abs() > reference.largest
    infinite = torch.isinf(y) & (torch.sign(y) == torch.sign(reference.y))
    # From here on no rounding or order of accumulation gives a finite value.
    must_overflow = reference.y.abs() >= reference.largest * _OVERFLOW
    error = torch.where(overflows & infinite, 0.0, error)
    return torch.where(must_overflow & ~infinite, torch.inf, error)


def judge_error(
    y: torch.Tensor, reference: Reference, tolerance: float, name: str = "y"
) -> CheckResult:
    """Check that every element is within the tolerance; NaN never is. name: of y, for errors."""
    error = relative_error(y, reference)
    right = error <= tolerance  # false for NaN
    # NaN counts as the largest error; infinity stays what it is.
    worst = float(torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf).max())
    if bool(right.all()):
        return CheckResult(worst, None)
    # Integers have no error, but are equal or not.
    problem = f"relative error {worst:.2g}: " if y.is_floating_point() else ""
    return CheckResult(worst, None, _describe_wrong(~right, y, reference.y, problem, name))


def _rounding_hint(y: torch.Tensor, reference: Reference, tolerance: float) -> str:
    """Name the declaration under which results of an external kernel are right; empty: none."""
    for bits, name in ((FP16_BITS, "FP16"), (BF16_BITS, "BF16")):
        if judge_error(y, reference.rounded_to(bits), tolerance).is_correct:
            declared = f"rounds_to={bits} declares it"
            return f" (right for a kernel that rounds terms to {name}: {declared})"
    return ""


def _judge_exact(y: torch.Tensor, reference: Reference) -> CheckResult:
    expected = reference.y.to(y.dtype)
    equal = y == expected
    if bool(equal.all()):
        return CheckResult(None, True)
    return CheckResult(None, False, _describe_wrong(~equal, y, expected, "not bit-exact: "))


def _describe_wrong(
    wrong: torch.Tensor, y: torch.Tensor, expected: torch.Tensor, problem: str, name: str = "y"
) -> str:
    place = tuple(torch.nonzero(wrong)[0].tolist())
    index, count = f"[{','.join(map(str, place))}]" if place else "", int(wrong.sum())
    digits = 6 if y.is_floating_point() else 15
    y_text, expected_text = (f"{float(tensor[place]):.{digits}g}" for tensor in (y, expected))
    return (
        f"{problem}{count:,} of {wrong.numel():,} elements wrong, first {name}{index} = {y_text}, "
        f"expected {expected_text}"
    )


def _run_poisoned(run: Run, inputs: LinearInputs, bound: BoundKernel) -> torch.Tensor:
    size = bound.gemm.m, bound.gemm.n
    out = torch.full(size, torch.nan, dtype=bound.spec.output_dtype, device=bound.device)
    made = run(inputs, out)
    return out if made is None else made


def _exact_cases(bound: BoundKernel, seed: int) -> Iterator[tuple[LinearInputs, Reference]]:
    """Yield full-range codes, as dense as FP32 sums stay exact in any order, and small sums."""
    for density in _DENSITIES:
        inputs = full_range_inputs(bound, derive_seed(seed, "full"), density=density)
        reference = reference_of(bound.spec, inputs.x, inputs.w)
        if float(reference.magnitude.max()) < FP32_INTEGERS * _quantum(inputs):
            break
    yield inputs, reference
    inputs = small_sum_inputs(bound, derive_seed(seed, "small"))
    yield inputs, reference_of(bound.spec, inputs.x, inputs.w)


def _quantum(inputs: LinearInputs) -> float:
    """Return the common divisor of all products of a code pair and its scales."""
    x_scales, w_scales = inputs.x.scales, inputs.w.scales
    if inputs.w.row_scales is not None:
        w_scales = inputs.w.row_scales  # those of groups are integers
    assert x_scales is not None  # both operands are integers here
    assert w_scales is not None
    return float(x_scales.double().min() * w_scales.double().min())
