"""Scaled minifloats of 6 and 5 bits: E3M2 and E3M1 with one scale per row or group.

ZeroQuant(4+2) (arXiv 2312.08583) quantizes weights to these formats. A number has a sign, three
exponent bits with a bias of 3, and two or one mantissa bits. There are subnormals, but no infinity
and no NaN.
"""

from __future__ import annotations

import torch

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import fp8
from flexq_bench.kernels.formats.grouping import check_matrix, in_groups
from flexq_bench.kernels.formats.operand import Operand
from flexq_bench.kernels.formats.symmetric_quantization import scaled, scales_to

MANTISSA_BITS = {6: 2, 5: 1}  # by the bits of a code
EXPONENT_BITS, EXPONENT_BIAS = 3, 3
LARGEST = {8: fp8.LARGEST, 6: 28.0, 5: 24.0}
# By bits: mantissa bits, and the smallest exponent of normal (and subnormal) numbers.
_STEPS = {8: (3, -6), **{bits: (MANTISSA_BITS[bits], 1 - EXPONENT_BIAS) for bits in MANTISSA_BITS}}


def quantize_minifloat(matrix: torch.Tensor, bits: int, group: int | None = None) -> Operand:
    """Quantize [rows, K] to E3M2 (6 bits) or E3M1 (5) numbers with one FP16 scale per group.

    scale = fp16(max|x| / LARGEST), value = the nearest number to x / scale with the *stored* scale,
    ties to the even code, saturated at ±LARGEST. A group whose scale rounds to zero in FP16 has
    values of zero. The operand stores numbers as FP16, not codes.

    group: values of k that share a scale; None: one scale per row.
    Raises ShapeError if bits is not 5 or 6 or the matrix is not two-dimensional, and ValueError if
    it holds NaN or infinity, or values too large for an FP16 scale.
    """
    largest = LARGEST[checked_bits(bits)]
    check_matrix(matrix, group)
    rows, k = matrix.shape
    grouped = in_groups(matrix.double(), group)
    scales = scales_to(grouped, largest)
    numbers = nearest_minifloat(scaled(grouped, scales), bits)
    values = numbers.view(rows, -1)[:, :k].to(torch.float16).contiguous()
    return Operand(values, scales.squeeze(2), bits, group)


def nearest_minifloat(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Round float64 values to the nearest numbers of a format, ties to the even code, saturated.

    bits: 5 or 6, or 8 for E4M3.
    """
    mantissa_bits, min_exponent = _STEPS[bits]
    _, exponent = torch.frexp(values)  # the mantissa is in [0.5, 1)
    step = torch.exp2((exponent - 1).clamp(min=min_exponent).double() - mantissa_bits)
    return ((values / step).round() * step).clamp(-LARGEST[bits], LARGEST[bits])


def minifloat_numbers(bits: int) -> torch.Tensor:
    """Return the number of every code, float64 [2^bits].

    A code is sign, exponent and mantissa, from the top bit down. Raises ShapeError for other bits.
    """
    mantissa_bits = MANTISSA_BITS[checked_bits(bits)]
    code = torch.arange(1 << bits, device="cpu")
    mantissa = (code & ((1 << mantissa_bits) - 1)).double() / (1 << mantissa_bits)
    exponent = code >> mantissa_bits & ((1 << EXPONENT_BITS) - 1)
    leading = (exponent > 0).double()
    power = torch.exp2((exponent.clamp(min=1) - EXPONENT_BIAS).double())
    sign = 1.0 - 2.0 * (code >> (bits - 1)).double()
    return sign * (leading + mantissa) * power


def minifloat_codes(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the code of each number, int64: sign, exponent and mantissa from the top bit down.

    Raises ShapeError for other bits.
    """
    positive = minifloat_numbers(bits)[: 1 << (bits - 1)].to(numbers.device)
    magnitude = torch.searchsorted(positive, numbers.double().abs().contiguous())
    return magnitude | torch.signbit(numbers).long() << (bits - 1)


def checked_bits(bits: int) -> int:
    """Return `bits` if a minifloat has as many. Raises ShapeError otherwise."""
    if bits not in MANTISSA_BITS:
        raise ShapeError(f"minifloats have 5 or 6 bits, got {bits}")
    return bits
