"""Symmetric round-to-nearest quantization in groups along K (FlexQ, arXiv 2508.04405)."""

from __future__ import annotations

import math

import torch

from kernels.errors import ShapeError
from kernels.formats.grouping import check_matrix, in_groups, safe_divisor, work_dtype
from kernels.formats.operand import Operand

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
    check_bits(bits)
    check_matrix(matrix, group)
    rows, k = matrix.shape
    grouped = in_groups(matrix.to(work_dtype(matrix)), group)
    bottom = -(2 ** (bits - 1)) if top is None else -top
    top = 2 ** (bits - 1) - 1 if top is None else top
    scales = scales_to(grouped, top)
    codes = integer_codes(grouped, scales, (bottom, top)).view(rows, -1)[:, :k]
    return Operand(codes.to(torch.int8).contiguous(), scales.squeeze(2), bits, group)


def check_bits(bits: int) -> None:
    """Raises ShapeError if an integer code can't have this many bits."""
    if not 2 <= bits <= 8:
        raise ShapeError(f"integer codes have 2 to 8 bits, got {bits}")


def scales_to(grouped: torch.Tensor, largest: float, clip: float = 1.0) -> torch.Tensor:
    """FP16 scales [..., 1] of values [..., length]: clip · max|x| over the largest code's value.

    Raises ValueError if a scale passes what FP16 can carry.
    """
    scales = (grouped.abs().amax(dim=-1, keepdim=True) * clip / largest).to(torch.float16)
    # The largest alone tells: NaN and infinity both come through. One wait for a GPU, not three.
    if not math.isfinite(float(scales.detach().amax())):
        raise ValueError(
            f"values past {65504 * largest:,.0f} do not fit an FP16 scale with codes to {largest:g}"
        )
    return scales


def integer_codes(
    grouped: torch.Tensor, scales: torch.Tensor, limits: tuple[int, int]
) -> torch.Tensor:
    """Codes of values [..., length] under stored scales [..., 1], in the dtype of the values.

    limits: lowest and highest code.
    """
    return (grouped / safe_divisor(scales, grouped.dtype)).round_().clamp_(*limits)


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
