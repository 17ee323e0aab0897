"""Quantizing a matrix to any number format, and the format of a quantized matrix."""

from __future__ import annotations

import torch

from kernels.errors import ShapeError
from kernels.formats.dual_grained import quantize_dual_grained
from kernels.formats.fp8 import quantize_e4m3
from kernels.formats.minifloat import quantize_minifloat
from kernels.formats.mixed import quantize_mixed
from kernels.formats.number_format import Kind, NumberFormat
from kernels.formats.operand import Operand
from kernels.formats.symmetric_quantization import quantize_symmetric

_E4M3_BITS = 8  # of the floats: the others are minifloats


def quantize(matrix: torch.Tensor, number: NumberFormat) -> Operand:
    """Round [rows, K] to nearest: codes and scales; dense formats: the values as FP16.

    Raises ShapeError for formats that no kernel of ours takes or that don't fit the matrix, and
    ValueError for NaN, infinity or values past what a format carries.
    """
    if number.is_dense:
        return Operand(matrix.to(torch.float16), None, number.bits, None)
    if number.kind == "float":
        if number.bits == _E4M3_BITS:
            return quantize_e4m3(matrix)
        return quantize_minifloat(matrix, number.bits, number.group)
    if number.kind == "dual" and number.group is not None:
        return quantize_dual_grained(matrix, number.group)
    if number.kind == "mixed":
        return quantize_mixed(matrix, clip=number.clip)
    if number.kind == "balanced":
        top = number.limits[1]
        return quantize_symmetric(matrix, number.bits, number.group, top=top, share=number.clip)
    if number.kind == "symmetric":
        return quantize_symmetric(matrix, number.bits, number.group, share=number.clip)
    raise ShapeError(f"no kernel takes operands of format {number.name}")


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
