"""FlexQ's quantization formula: symmetric integers, one FP16 scale per group, round to nearest.

FlexQ (arXiv 2508.04405, section 3.1); ABQ-LLM (arXiv 2408.08554) and RTN use it with one scale per
row. For values x of a group and codes of b bits, top = 2^(b-1) - 1:

    scale = fp16(share · max|x| / top)
    code  = clamp(round(x / scale), -top - 1, top)

- The scale is rounded to FP16, half to even, subnormals included, and codes are computed with the
  *stored* scale, so that code · scale is what every kernel computes with.
- `round` rounds ties to even.
- If the scale is zero in FP16 (a group of zeros, or of too small values), all codes are zero.
- NaN, infinity, and values whose scale exceeds the range of FP16 raise ValueError.
- share is 1, or less if a scheme clips the range; values beyond it saturate.
- Divisions are IEEE divisions. FP16 and BF16 values are divided in FP32: a quotient of two such
  numbers is never rounded to the wrong side of a tie (quotients are multiples of 2^-11 / scale
  apart). Other values are divided in float64.

This module is the definition. Two faster implementations exist: `triton_rounding` (activations and
training on a GPU) and `csrc/common/quantize.cuh` (packing kernels).
tests/kernels/test_quantization_formula.py and tests/gpu/test_quantization_formula.py compare each
with this module bit for bit.
"""

from __future__ import annotations

import math

import torch

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats.grouping import check_matrix, in_groups, safe_divisor, work_dtype
from flexq_bench.kernels.formats.operand import Operand

# Static scale for activations without a calibrated one: 127 · 0.75 = 95 covers a standard normal
# distribution with outliers 20 times as large.
STATIC_SCALE = 0.75


def group_scales(
    largest: torch.Tensor, top: float, share: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Return FP16 scales of groups with these largest magnitudes, in their shape, unchecked.

    top: the largest code's value. share: of a group's range that the codes span.
    """
    return quotients(largest * share, top).to(torch.float16)


def quotients(largest: torch.Tensor, top: float) -> torch.Tensor:
    """Divide by the largest code's value.

    By a tensor: for a Python number a GPU multiplies by its rounded reciprocal.
    """
    return largest / torch.full_like(largest, top)


def finite_scales(scales: torch.Tensor, top: float) -> torch.Tensor:
    """Return scales. Raises ValueError if one exceeds the range of its type, or for NaN."""
    # amax propagates NaN and infinity, so one check (and one GPU synchronization) is enough.
    if not math.isfinite(float(scales.detach().amax())):
        most = torch.finfo(scales.dtype).max
        name = {torch.bfloat16: "BF16", torch.float32: "FP32"}.get(scales.dtype, "FP16")
        raise ValueError(
            f"values past {most * top:,.0f} do not fit an {name} scale with codes to {top:g}"
        )
    return scales


def scales_to(grouped: torch.Tensor, top: float, share: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Return FP16 scales [..., 1] of groups [..., length], as `group_scales`.

    Raises ValueError if a scale exceeds the range of FP16, or for NaN or infinity.
    """
    return finite_scales(group_scales(grouped.abs().amax(dim=-1, keepdim=True), top, share), top)


def scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Divide values [..., length] by their stored scales [..., 1]; a scale of zero gives zeros."""
    return values / safe_divisor(scales, values.dtype)


def nearest_codes_(quotients: torch.Tensor, limits: tuple[int, int]) -> torch.Tensor:
    """Round `scaled` values to codes in place, in their dtype. limits: lowest and highest code."""
    return quotients.round_().clamp_(*limits)


def code_limits(bits: int) -> tuple[int, int]:
    """Return the lowest and highest code. Raises ShapeError unless bits is in 2 … 8."""
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
    """Quantize [rows, K] to signed codes of `bits` bits with one FP16 scale per group.

    group: values of k that share a scale; None: one scale per row. The last group of a row is
    shorter if K is not a multiple.
    top: codes lie in -top … top; None: in -2^(bits-1) … 2^(bits-1) - 1.
    share: of a group's range that the codes span; [rows, groups]: of each group's.

    Raises ShapeError if bits is not in 2 … 8, group < 1 or the matrix is not two-dimensional, and
    ValueError if it holds NaN or infinity, or values too large for an FP16 scale.
    """
    limits = code_limits(bits)
    if top is not None:
        limits = -top, top
    check_matrix(matrix, group)
    rows, k = matrix.shape
    grouped = in_groups(matrix.to(work_dtype(matrix)), group)
    group_share = share.unsqueeze(2) if isinstance(share, torch.Tensor) else share
    scales = scales_to(grouped, limits[1], group_share)
    codes = nearest_codes_(scaled(grouped, scales), limits).view(rows, -1)[:, :k]
    return Operand(codes.to(torch.int8).contiguous(), scales.squeeze(2), bits, group)


def quantize_static(matrix: torch.Tensor, bits: int, scale: float = STATIC_SCALE) -> Operand:
    """Quantize [rows, K] with one static scale, the same for every row.

    Values are divided in FP32; values out of range saturate.
    scale: a positive FP16 number. Raises ShapeError if it is not, and ValueError for NaN.
    """
    if not (
        0 < scale < math.inf
        and float(torch.tensor(scale, dtype=torch.float16, device="cpu")) == scale
    ):
        raise ShapeError(f"a static scale is a positive FP16 number, got {scale}")
    if bool(torch.isnan(matrix).any()):
        raise ValueError("cannot quantize NaN: find out where the input got it")
    scales = torch.full((matrix.shape[0], 1), scale, dtype=torch.float16, device=matrix.device)
    codes = nearest_codes_(scaled(matrix.float(), scales), code_limits(bits))
    return Operand(codes.to(torch.int8), scales, bits, None, block_rows=None)
