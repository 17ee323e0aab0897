"""Scaled E4M3: FP8 codes of four exponent and three mantissa bits, one scale per row."""

from __future__ import annotations

import torch

from flexq_bench.kernels.formats.grouping import check_matrix
from flexq_bench.kernels.formats.operand import Operand

LARGEST = 448.0  # of E4M3 without infinities (OCP 8-bit floating point specification, table 1)


def quantize_e4m3(matrix: torch.Tensor) -> Operand:
    """Quantize [rows, K] to E4M3 codes with one FP16 scale per row.

    scale = fp16(max|x| / 448), code = e4m3(x / scale) by an FP32 division with the *stored* scale,
    rounded half to even and saturated at ±448. A row whose scale rounds to zero in FP16 has codes
    of zero.

    Raises ShapeError if the matrix is not two-dimensional, and ValueError if it holds NaN or
    infinity.
    """
    check_matrix(matrix, None)
    work = matrix.to(torch.float32)
    scales = (work.abs().amax(dim=1, keepdim=True) / LARGEST).to(torch.float16)
    divisor = torch.where(scales == 0, torch.inf, scales.float())
    # torch converts values out of range to NaN instead of saturating.
    codes = (work / divisor).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Operand(codes, scales, 8, None)
