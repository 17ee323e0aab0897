"""Quantization of a matrix to any number format, and the format of a quantized matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats.asymmetric import asymmetric_types, quantize_asymmetric
from flexq_bench.kernels.formats.dual_grained import quantize_dual_grained, quantize_six_bits
from flexq_bench.kernels.formats.grouping import check_matrix, in_groups
from flexq_bench.kernels.formats.mixed import TAIL_BITS, quantize_mixed
from flexq_bench.kernels.formats.number_format import DENSE_TYPES, Kind, NumberFormat, Scaling
from flexq_bench.kernels.formats.operand import Operand
from flexq_bench.kernels.formats.scales import SCALE_TYPES
from flexq_bench.kernels.formats.symmetric_quantization import quantize_symmetric

# Values that are rounded at once: a large layer in float64 would need too much memory. A GPU waits
# for the host once per chunk.
_CHUNK_VALUES, _GPU_CHUNK_VALUES = 1 << 22, 1 << 24


def quantize(
    matrix: torch.Tensor,
    number: NumberFormat,
    *,
    shares: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> Operand:
    """Quantize [rows, K] by rounding to nearest; dense formats: convert to their type.

    shares: [rows, groups], the share of each group's range that its codes span, multiplied by the
    format's clip; only for integers. With zero points [rows, groups, 2], of the parts below and
    above 0. None: ones. order: of the channels, for mixed formats; None: default_order.

    Raises ShapeError for formats without an operand or that don't fit the matrix, and ValueError
    for NaN, infinity or values out of a format's range.
    """
    if shares is not None and number.kind not in ("symmetric", "balanced", "asymmetric"):
        raise ShapeError(f"only integers have a share for each group, not {number.name}")
    if shares is not None:
        _check_shares(shares, matrix, number)
    is_plain = number.scale == "fp16" or number.kind == "asymmetric"
    if number.kind == "float" or number.shares_rows or not is_plain:
        return _quantize_blocks(matrix, number, shares)
    values = _GPU_CHUNK_VALUES if matrix.is_cuda else _CHUNK_VALUES
    rows = max(1, values // max(1, matrix.shape[-1]))
    if matrix.ndim != 2 or matrix.shape[0] <= rows:
        return _quantize_rows(matrix, number, shares, order)
    parts = torch.split(matrix, rows)
    part_shares = [None] * len(parts) if shares is None else torch.split(shares, rows)
    return Operand.stacked(
        [
            _quantize_rows(part, number, share, order)
            for part, share in zip(parts, part_shares, strict=True)
        ]
    )


def _check_shares(shares: torch.Tensor, matrix: torch.Tensor, number: NumberFormat) -> None:
    rows, k = matrix.shape
    groups = 1 if number.group is None else -(-k // number.group)
    expected = (rows, groups, 2) if number.kind == "asymmetric" else (rows, groups)
    if tuple(shares.shape) != expected:
        raise ShapeError(f"shares of {number.name} must be {expected}, got {tuple(shares.shape)}")


def _quantize_rows(
    matrix: torch.Tensor,
    number: NumberFormat,
    shares: torch.Tensor | None,
    order: torch.Tensor | None,
) -> Operand:
    """Quantize rows at once; the result of a row does not depend on the others."""
    if number.is_dense:
        return Operand(matrix.to(DENSE_TYPES[number.dense_type]), None, number.bits, None)
    if number.kind == "normal":  # dequantized: an operand's codes are integers or floats
        return Operand(number.round(matrix), None, 32, None)
    if number.kind == "dual" and number.group is not None and number.clip == 1:
        dual = quantize_dual_grained if number.has_zero_points else quantize_six_bits
        return dual(matrix, number.group)
    if number.kind == "mixed" and number.group is not None:
        return quantize_mixed(matrix, order, bits=number.bits, group=number.group, clip=number.clip)
    if number.kind == "asymmetric":
        share = number.clip if shares is None else shares * number.clip
        kind = SCALE_TYPES[number.scale]
        return quantize_asymmetric(matrix, number.bits, number.group, share, kind)
    if number.kind in ("symmetric", "balanced"):
        top = number.limits[1] if number.kind == "balanced" else None
        share = number.clip if shares is None else shares * number.clip
        return quantize_symmetric(matrix, number.bits, number.group, top=top, share=share)
    raise ShapeError(f"no operand has codes of format {number.name} with clip {number.clip:g}")


def _quantize_blocks(
    matrix: torch.Tensor, number: NumberFormat, shares: torch.Tensor | None
) -> Operand:
    """Quantize to floats or symmetric integers, with scales of any type and block."""
    if shares is not None:
        raise ShapeError(f"only integers with FP16 scales have shares, not {number.name}")
    check_matrix(matrix, number.group)
    scaling = number.scaling_of(matrix)
    k, dtype = matrix.shape[1], number.work_dtype(matrix)
    rows, codes = max(1, _CHUNK_VALUES // k), []
    for start in range(0, matrix.shape[0], rows):
        part = slice(start, start + rows)
        grouped = in_groups(matrix[part].to(dtype), number.group)
        scales = replace(scaling, scales=scaling.scales[part].unsqueeze(2))
        rounded = number.rounder(scales, dtype).codes(grouped)
        codes.append(rounded.view(grouped.shape[0], -1)[:, :k].to(_code_dtype(number)))
    return _operand(torch.cat(codes), scaling.scales, None, number, scaling.matrix_scale)


def _code_dtype(number: NumberFormat) -> torch.dtype:
    return number.float_type.dtype if number.kind == "float" else torch.int8


def _operand(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    number: NumberFormat,
    matrix_scale: float = 1.0,
) -> Operand:
    row_scales = None
    if number.scale == "e4m3":
        shape, device = (codes.shape[0], 1), codes.device
        row_scales = torch.full(shape, matrix_scale, dtype=torch.float32, device=device)
    return Operand(
        codes.contiguous(),
        scales,
        number.bits,
        number.group,
        zero_points,
        row_scales=row_scales,
        tail_bits=TAIL_BITS if number.kind == "mixed" else None,
        element=number.element,
        block_rows=number.block_rows,
    )


def assembled(codes: torch.Tensor, scalings: Sequence[Scaling], number: NumberFormat) -> Operand:
    """Build the operand of codes [rows, K] that were rounded group by group.

    scalings: one for each group of number.columns(K).
    """
    code_dtype, zero_dtype = _code_dtype(number), torch.int8
    if number.kind == "asymmetric":
        code_dtype, zero_dtype = asymmetric_types(number.bits)
    zeros = [s.zero_points.to(zero_dtype) for s in scalings if s.zero_points is not None]
    scales = torch.cat([scaling.scales for scaling in scalings], dim=1)
    return _operand(
        codes.to(code_dtype), scales, torch.cat(zeros, dim=1) if zeros else None, number
    )


def format_of(operand: Operand) -> NumberFormat:
    """Return the format of an operand; balanced integers appear as symmetric ones.

    Raises ShapeError if no format has its bits and group.
    """
    if operand.scales is None:
        element = "bf16" if operand.values.dtype == torch.bfloat16 else ""
        return NumberFormat(operand.bits, kind="dense", element=element)
    kind: Kind = "symmetric"
    if operand.tail_bits is not None:
        kind = "mixed"
    elif operand.values.is_floating_point():
        kind = "float"
    elif operand.row_scales is not None:
        kind = "dual"
    elif operand.zero_points is not None:
        kind = "asymmetric"
    scale = next(
        (name for name, dtype in SCALE_TYPES.items() if dtype == operand.scales.dtype), "?"
    )
    return NumberFormat(
        operand.bits,
        operand.group,
        kind,
        element=operand.element,
        block_rows=operand.block_rows,
        scale=scale,
    )
