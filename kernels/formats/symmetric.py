"""Symmetric round-to-nearest quantization in groups along K (FlexQ, arXiv 2508.04405)."""

from __future__ import annotations

import math

import torch

from kernels.errors import ShapeError
from kernels.formats.operand import Operand

_EXACT_IN_FP32 = (torch.float16, torch.bfloat16)


# One for activations where a calibration brings none: 127 of it is 95, past which a standard normal
# distribution with outliers 20 times as large hardly goes.
STATIC_SCALE = 0.75
BALANCED_TOP = 2  # bit-balanced 2-bit codes: -2 … 2, which take three bits (ABQ-LLM's W2*)


def quantize_symmetric(
    matrix: torch.Tensor, bits: int, group: int | None = 128, *, top: int | None = None
) -> Operand:
    """Quantize [rows, K] to signed codes of `bits` bits with one FP16 scale a group.

    scale = fp16(max|x| / (2^(bits-1) - 1)), code = clamp(round_half_even(x / scale)) with the
    *stored* scale, so that code·scale is what every kernel computes with. A group whose scale
    rounds to zero in FP16 has codes of zero.

    group: values of k that share a scale; None: one scale a row.
    top: the largest code, of both signs; None: 2^(bits-1) - 1, and one more below zero.
    The quotient of two FP16 or BF16 numbers rounded to FP32 is never on the wrong side of a tie
    (quotients are multiples of 2^-11/scale apart), so FP32 division is exact for them; other
    inputs are divided in float64.

    Raises ShapeError if bits is not in 2 … 8, group < 1 or the matrix is not two-dimensional, and
    ValueError if it holds NaN or infinity, or values past what an FP16 scale can carry.
    """
    if not 2 <= bits <= 8:
        raise ShapeError(f"integer codes have 2 to 8 bits, got {bits}")
    if group is not None and group < 1:
        raise ShapeError(f"a group needs at least one value, got {group}")
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ShapeError(f"need a matrix with at least one value, got {tuple(matrix.shape)}")
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("cannot quantize NaN or infinity: find out where the input got them")

    rows, k = matrix.shape
    length = k if group is None else group
    groups = -(-k // length)
    work = matrix.to(torch.float32 if matrix.dtype in _EXACT_IN_FP32 else torch.float64)
    padded = torch.nn.functional.pad(work, (0, groups * length - k)).view(rows, groups, length)

    bottom = -(2 ** (bits - 1)) if top is None else -top
    top = 2 ** (bits - 1) - 1 if top is None else top
    scales = (padded.abs().amax(dim=2) / top).to(torch.float16)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(f"values past {65504 * top:,} do not fit {bits} bits with an FP16 scale")
    divisor = torch.where(scales == 0, torch.inf, scales.to(work.dtype)).unsqueeze(2)
    codes = torch.round(padded / divisor).clamp_(bottom, top)
    values = codes.view(rows, groups * length)[:, :k].to(torch.int8).contiguous()
    return Operand(values, scales, bits, group)


def quantize_static(matrix: torch.Tensor, bits: int, scale: float = STATIC_SCALE) -> Operand:
    """Quantize [rows, K] with one scale that was chosen before, the same for every row.

    code = clamp(round_half_even(x / scale)) by an FP32 division: what is past the range saturates.
    scale: a positive FP16 number. Raises ShapeError if it is none, and ValueError for NaN.
    """
    if not (0 < scale < math.inf and float(torch.tensor(scale).half()) == scale):
        raise ShapeError(f"a static scale is a positive FP16 number, got {scale}")
    if bool(torch.isnan(matrix).any()):
        raise ValueError("cannot quantize NaN: find out where the input got it")
    top = 2 ** (bits - 1) - 1
    codes = (matrix.float() / scale).round().clamp(-top - 1, top).to(torch.int8)
    scales = torch.full((matrix.shape[0], 1), scale, dtype=torch.float16, device=matrix.device)
    return Operand(codes, scales, bits, None)
