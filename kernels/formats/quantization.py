"""Quantizing a matrix to any number format, and the format of a quantized matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.errors import ShapeError
from kernels.formats.asymmetric import asymmetric_types, quantize_asymmetric
from kernels.formats.dual_grained import quantize_dual_grained, quantize_six_bits
from kernels.formats.fp8 import quantize_e4m3
from kernels.formats.minifloat import quantize_minifloat
from kernels.formats.mixed import TAIL_BITS, quantize_mixed
from kernels.formats.number_format import Kind, NumberFormat, Scaling
from kernels.formats.operand import Operand
from kernels.formats.symmetric_quantization import quantize_symmetric

_E4M3_BITS = 8  # of the floats: the others are minifloats
# Rows are rounded so many values at a time: in float64 a large layer would take the memory of
# several blocks.
_CHUNK_VALUES = 1 << 22


def quantize(
    matrix: torch.Tensor,
    number: NumberFormat,
    *,
    shares: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> Operand:
    """Round [rows, K] to nearest: codes and scales; dense formats: the values as FP16.

    shares: [rows, groups], what the codes of each group span of its range beside the format's clip,
    for integers; with zero points [rows, groups, 2], of the part below 0 and of that above. None:
    all of it. order: of the channels, for mixed ones; None: their
    default_order.

    Raises ShapeError for formats that no operand has or that don't fit the matrix, and ValueError
    for NaN, infinity or values past what a format carries.
    """
    if shares is not None and number.kind not in ("symmetric", "balanced", "asymmetric"):
        raise ShapeError(f"only integers have a share for each group, not {number.name}")
    if shares is not None:
        _check_shares(shares, matrix, number)
    rows = max(1, _CHUNK_VALUES // max(1, matrix.shape[-1]))
    if matrix.ndim != 2 or matrix.shape[0] <= rows:
        return _quantize_rows(matrix, number, shares, order)
    parts = torch.split(matrix, rows)
    of_parts = [None] * len(parts) if shares is None else torch.split(shares, rows)
    return Operand.stacked(
        [
            _quantize_rows(part, number, share, order)
            for part, share in zip(parts, of_parts, strict=True)
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
    """`quantize` of rows that are rounded together; a row doesn't depend on the others."""
    if number.is_dense:
        return Operand(matrix.to(torch.float16), None, number.bits, None)
    if number.kind == "float" and number.clip == 1:
        if number.bits == _E4M3_BITS:
            return quantize_e4m3(matrix)
        return quantize_minifloat(matrix, number.bits, number.group)
    if number.kind == "dual" and number.group is not None and number.clip == 1:
        dual = quantize_dual_grained if number.has_zero_points else quantize_six_bits
        return dual(matrix, number.group)
    if number.kind == "mixed" and number.group is not None:
        return quantize_mixed(matrix, order, bits=number.bits, group=number.group, clip=number.clip)
    if number.kind == "asymmetric":
        share = number.clip if shares is None else shares * number.clip
        return quantize_asymmetric(matrix, number.bits, number.group, share)
    if number.kind in ("symmetric", "balanced"):
        top = number.limits[1] if number.kind == "balanced" else None
        share = number.clip if shares is None else shares * number.clip
        return quantize_symmetric(matrix, number.bits, number.group, top=top, share=share)
    raise ShapeError(f"no operand has codes of format {number.name} with clip {number.clip:g}")


def assembled(codes: torch.Tensor, scalings: Sequence[Scaling], number: NumberFormat) -> Operand:
    """The operand of codes [rows, K] that were rounded group by group.

    scalings: of each of number.columns(K).
    """
    of_codes, of_zeros = torch.int8, torch.int8
    if number.kind == "float":
        of_codes = torch.float16
    elif number.kind == "asymmetric":
        of_codes, of_zeros = asymmetric_types(number.bits)
    zeros = [s.zero_points.to(of_zeros) for s in scalings if s.zero_points is not None]
    return Operand(
        codes.to(of_codes).contiguous(),
        torch.cat([scaling.scales for scaling in scalings], dim=1),
        number.bits,
        number.group,
        torch.cat(zeros, dim=1) if zeros else None,
        tail_bits=TAIL_BITS if number.kind == "mixed" else None,
    )


def format_of(operand: Operand) -> NumberFormat:
    """The format of an operand's codes; balanced integers are symmetric ones of as many bits.

    Raises ShapeError if there is none.
    """
    if operand.scales is None:
        return NumberFormat(operand.bits, kind="dense")
    kind: Kind = "symmetric"
    if operand.tail_bits is not None:
        kind = "mixed"
    elif operand.row_scales is not None:
        kind = "dual"
    elif operand.zero_points is not None:
        kind = "asymmetric"
    elif operand.values.is_floating_point():
        kind = "float"
    return NumberFormat(operand.bits, operand.group, kind)
