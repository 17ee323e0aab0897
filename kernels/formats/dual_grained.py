"""Dual-grained quantization: integer scales of groups, FP16 scales of rows (DGQ).

DGQ (arXiv 2310.04836, section 3.2): W = S1 · S2 · (code + zero point), with S2 and the zero point
of a group and S1 of a row. S2 · (code + zero point) must fit int8, so that an int8 GEMM can sum
over all of K. Rounding to nearest ensures it by a larger S1, DGQ's search (`flexq_bench.schemes`)
by limiting codes.

Codes have 4 bits. With 6 bits there are no zero points: codes lie in -31 … 31 and S2 in 1 … 4, so
that |S2 · code| is at most 124.
"""

from __future__ import annotations

import torch

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats.grouping import check_matrix, in_groups, safe_divisor
from flexq_bench.kernels.formats.operand import Operand
from flexq_bench.kernels.formats.symmetric_quantization import scales_to

CODE_BITS = 4
TOP_CODE = (1 << CODE_BITS) - 1
LARGEST_INT8 = 127
SIX_BITS, TOP_SIX_BIT_CODE, TOP_SIX_BIT_SCALE = 6, 31, 4
LARGEST_SIX_BIT_PRODUCT = TOP_SIX_BIT_CODE * TOP_SIX_BIT_SCALE
# A row's largest magnitude is 119 · S1. A scale S2 is then at most 16, and rounding to a multiple
# of it changes a value by at most 8: never past 127.
_SPAN = 119


def quantize_dual_grained(matrix: torch.Tensor, group: int = 128) -> Operand:
    """Quantize [rows, K] to codes 0 … 15 by rounding to nearest.

    S1 = fp16(max|row| / 119). Per group, with its range widened to contain zero:
    S2 = ceil((max - min) / (15 · S1)), zero point = round(min / (S1 · S2)) in -15 … 0, code =
    round(x / (S1 · S2)) - zero point in 0 … 15; ties are rounded to even. A row whose S1 is zero
    dequantizes to zeros.

    Raises ShapeError if the matrix is not two-dimensional, ValueError if it holds NaN or infinity,
    or values too large for an FP16 scale.
    """
    check_matrix(matrix, group)
    rows, k = matrix.shape
    work = in_groups(matrix.double(), group)
    row_scales = (work.abs().amax(dim=(1, 2)) / _SPAN).to(torch.float16).unsqueeze(1)
    if not bool(torch.isfinite(row_scales).all()):
        raise ValueError(f"values past {65504 * _SPAN:,} do not fit with an FP16 scale")
    # The FP16 scale may have been rounded down, so values are clamped to 119 of it.
    units = (work / row_scales.double().unsqueeze(2)).nan_to_num(0.0, 0.0, 0.0)
    units = units.clamp(-_SPAN, _SPAN)
    low, high = units.amin(dim=2).clamp(max=0), units.amax(dim=2).clamp(min=0)
    scales = ((high - low) / TOP_CODE).ceil().clamp(min=1)
    zeros = (low / scales).round().clamp(-TOP_CODE, 0)
    codes = (units / scales.unsqueeze(2)).round() - zeros.unsqueeze(2)
    values = codes.clamp(0, TOP_CODE).view(rows, -1)[:, :k].to(torch.int8).contiguous()
    return Operand(
        values, scales.half(), CODE_BITS, group, zeros.to(torch.int8), row_scales=row_scales
    )


def quantize_six_bits(matrix: torch.Tensor, group: int = 128) -> Operand:
    """Quantize [rows, K] to codes -31 … 31 by rounding to nearest, ties to even.

    S1 = fp16(max|row| / 124). Per group S2 = ceil(max / (31 · S1)) in 1 … 4, code =
    round(x / (S1 · S2)). A row whose S1 is zero dequantizes to zeros.

    Raises as quantize_dual_grained.
    """
    check_matrix(matrix, group)
    rows, k = matrix.shape
    work = in_groups(matrix.double(), group)
    row_scales = scales_to(work.abs().amax(dim=(1, 2)).unsqueeze(1), LARGEST_SIX_BIT_PRODUCT)
    units = work / safe_divisor(row_scales, work.dtype).unsqueeze(2)
    scales = (units.abs().amax(dim=2) / TOP_SIX_BIT_CODE).ceil().clamp(1, TOP_SIX_BIT_SCALE)
    codes = six_bit_codes(units, scales.unsqueeze(2)).view(rows, -1)[:, :k]
    return Operand(
        codes.to(torch.int8).contiguous(), scales.half(), SIX_BITS, group, row_scales=row_scales
    )


def six_bit_codes(units: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the nearest codes of values in units of S1; scales S2 are broadcast."""
    return (units / scales).round().clamp(-TOP_SIX_BIT_CODE, TOP_SIX_BIT_CODE)


def int8_values(operand: Operand) -> torch.Tensor:
    """Return S2 · (code + zero point), int8 [rows, K]: the input of an int8 tensor core.

    Raises ShapeError if a product lies outside -128 … 127, or a code, scale or zero point is not an
    integer in its range.
    """
    scales, zeros = operand.scales, operand.zero_points
    six_bits = operand.bits == SIX_BITS
    if scales is None or (zeros is None) != six_bits:
        raise ShapeError("need dual-grained codes, with zero points and scales of groups")
    checks = [
        ("codes", operand.values, -TOP_SIX_BIT_CODE, TOP_SIX_BIT_CODE),
        ("scales of groups", scales, 1, TOP_SIX_BIT_SCALE),
    ]
    if zeros is not None:
        checks = [
            ("codes", operand.values, 0, TOP_CODE),
            ("zero points", zeros, -TOP_CODE, 0),
            ("scales of groups", scales, 0, LARGEST_INT8),
        ]
    for name, tensor, lowest, highest in checks:
        numbers = tensor.double()
        if bool(((numbers < lowest) | (numbers > highest) | (numbers != numbers.round())).any()):
            raise ShapeError(f"{name} must be integers in {lowest} … {highest}")

    def per_value(group_values: torch.Tensor) -> torch.Tensor:
        wide = group_values.to(torch.int32).repeat_interleave(operand.group_length, dim=1)
        return wide[:, : operand.k]

    shifted = operand.values.to(torch.int32)
    if zeros is not None:
        shifted += per_value(zeros)
    products = per_value(scales) * shifted
    low, high = int(products.min()), int(products.max())
    if low < -128 or high > 127:
        raise ShapeError(
            f"scale · (code + zero point) lies in {low} … {high} and must fit int8: "
            "quantize with a smaller scale of groups and a larger one of rows"
        )
    return products.to(torch.int8)
