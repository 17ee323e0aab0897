"""FlexQ's quantization formula: symmetric integers, one FP16 scale a group, round to nearest.

FlexQ (arXiv 2508.04405, section 3.1); ABQ-LLM (arXiv 2408.08554) and RTN have it with one scale a
row. For values x of a group and codes of b bits, top = 2^(b-1) - 1:

    scale = fp16(share · max|x| / top)
    code  = clamp(round(x / scale), -top - 1, top)

- The scale is rounded to FP16, half to even, subnormals included, and codes are computed with the
  *stored* scale, so that code · scale is what every kernel computes with.
- `round` takes half to even.
- A scale that is zero in FP16 (a group of zeros, or of values too small) has codes of zero.
- NaN, infinity, and values whose scale passes FP16's range are refused.
- share is 1, or less where a scheme clips the range; what is beyond it saturates.
- Divisions are IEEE divisions. FP16 and BF16 values are divided in FP32: a quotient of two such
  numbers is never rounded to the wrong side of a tie (quotients are multiples of 2^-11 / scale
  apart). Other values are divided in float64.

This is the definition. It is computed once more where torch's operations are too slow:
`triton_rounding` (activations and training on a GPU) and `csrc/quantize.cuh` (kernels that pack).
tests/kernels/test_quantization_formula.py and tests/gpu/test_quantization_formula.py compare each
with this module bit for bit.
"""

from __future__ import annotations

import math

import torch

from kernels.errors import ShapeError
from kernels.formats.grouping import check_matrix, in_groups, safe_divisor, work_dtype
from kernels.formats.operand import Operand

# One for activations where a calibration brings none: 127 of it is 95, past which a standard normal
# distribution with outliers 20 times as large hardly goes.
STATIC_SCALE = 0.75


def group_scales(
    largest: torch.Tensor, top: float, share: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """FP16 scales of groups whose largest magnitudes are given, in their shape; nothing is refused.

    top: the largest code's value. share: of a group's range that the codes span.
    """
    reach = largest * share
    # Not by a number: a GPU then multiplies by its reciprocal, which rounds otherwise.
    return (reach / torch.full_like(reach, top)).to(torch.float16)


def scales_to(grouped: torch.Tensor, top: float, share: torch.Tensor | float = 1.0) -> torch.Tensor:
    """FP16 scales [..., 1] of values [..., length] that share one, as `group_scales`.

    Raises ValueError if a scale passes what FP16 can carry.
    """
    scales = group_scales(grouped.abs().amax(dim=-1, keepdim=True), top, share)
    # The largest alone tells: NaN and infinity both come through. One wait for a GPU, not three.
    if not math.isfinite(float(scales.detach().amax())):
        raise ValueError(
            f"values past {65504 * top:,.0f} do not fit an FP16 scale with codes to {top:g}"
        )
    return scales


def scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values [..., length] over their stored scales [..., 1]; a scale of zero gives zeros."""
    return values / safe_divisor(scales, values.dtype)


def nearest_codes_(quotients: torch.Tensor, limits: tuple[int, int]) -> torch.Tensor:
    """Codes of `scaled` values, in place and in their dtype. limits: lowest and highest code."""
    return quotients.round_().clamp_(*limits)


def code_limits(bits: int) -> tuple[int, int]:
    """Lowest and highest code of `bits` bits. Raises ShapeError unless bits is in 2 … 8."""
    if not 2 <= bits <= 8:
        raise ShapeError(f"integer codes have 2 to 8 bits, got {bits}")
    half: int = 2 ** (bits - 1)
    return -half, half - 1


def quantize_symmetric(
    matrix: torch.Tensor,
    bits: int,
    group: int | None = 128,
    *,
    top: int | None = None,
    share: torch.Tensor | float = 1.0,
) -> Operand:
    """Quantize [rows, K] to signed codes of `bits` bits with one FP16 scale a group.

    group: values of k that share a scale; None: one scale a row. The last group of a row is shorter
    where K is not a multiple.
    top: the largest code, of both signs; None: 2^(bits-1) - 1, and one more below zero.
    share: of a group's range that the codes span; [rows, groups]: of each group's.

    Raises ShapeError if bits is not in 2 … 8, group < 1 or the matrix is not two-dimensional, and
    ValueError if it holds NaN or infinity, or values past what an FP16 scale can carry.
    """
    limits = code_limits(bits)
    if top is not None:
        limits = -top, top
    check_matrix(matrix, group)
    rows, k = matrix.shape
    grouped = in_groups(matrix.to(work_dtype(matrix)), group)
    of_groups = share.unsqueeze(2) if isinstance(share, torch.Tensor) else share
    scales = scales_to(grouped, limits[1], of_groups)
    codes = nearest_codes_(scaled(grouped, scales), limits).view(rows, -1)[:, :k]
    return Operand(codes.to(torch.int8).contiguous(), scales.squeeze(2), bits, group)


def quantize_static(matrix: torch.Tensor, bits: int, scale: float = STATIC_SCALE) -> Operand:
    """Quantize [rows, K] with one scale that was chosen before, the same for every row.

    Values are divided in FP32; what is past the range saturates.
    scale: a positive FP16 number. Raises ShapeError if it is none, and ValueError for NaN.
    """
    if not (0 < scale < math.inf and float(torch.tensor(scale).half()) == scale):
        raise ShapeError(f"a static scale is a positive FP16 number, got {scale}")
    if bool(torch.isnan(matrix).any()):
        raise ValueError("cannot quantize NaN: find out where the input got it")
    scales = torch.full((matrix.shape[0], 1), scale, dtype=torch.float16, device=matrix.device)
    codes = nearest_codes_(scaled(matrix.float(), scales), code_limits(bits))
    return Operand(codes.to(torch.int8), scales, bits, None)
