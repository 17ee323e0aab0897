"""Asymmetric integers: unsigned codes, an FP16 scale and a zero point per group.

The weights of GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978). For values x of a group and codes
of b bits, top = 2^b - 1:

    low, high  = share · min(x, 0), share · max(x, 0)     (or one share for each of the two)
    scale      = fp16((high - low) / top)
    zero point = clamp(round(low / scale), -top, 0)
    code       = clamp(round(x / scale) - zero point, 0, top)

The dequantized value is (code + zero point) · scale. The range always contains zero, which is
therefore exact: padding and masked tokens stay zero. Rounding, scales, share and rejected values
are as in `symmetric_quantization`.
"""

from __future__ import annotations

import math

import torch

from flexq_bench.kernels.formats.grouping import check_matrix, in_groups, safe_divisor, work_dtype
from flexq_bench.kernels.formats.operand import Operand
from flexq_bench.kernels.formats.symmetric_quantization import code_limits

_SIGNED_BITS = 7  # unsigned codes of up to 7 bits fit int8


def asymmetric_scaling(
    grouped: torch.Tensor,
    top: int,
    share: float | torch.Tensor = 1.0,
    scale_type: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales of a type and zero points [..., 1] of groups [..., length].

    Zero points have the values' dtype.
    share: of the range; a tensor [..., 2]: of its parts below and above 0.
    Raises ValueError if a scale exceeds the range of its type.
    """
    below = share[..., :1] if isinstance(share, torch.Tensor) else share
    above = share[..., 1:] if isinstance(share, torch.Tensor) else share
    low = grouped.amin(dim=-1, keepdim=True).clamp_max(0) * below
    high = grouped.amax(dim=-1, keepdim=True).clamp_min(0) * above
    scales = ((high - low) / top).to(scale_type)
    if not math.isfinite(float(scales.detach().amax())):
        raise ValueError(f"a range past {65504 * top:,} does not fit an FP16 scale")
    zero_points = torch.round(low / safe_divisor(scales, grouped.dtype)).clamp_(-top, 0)
    return scales, zero_points


def asymmetric_types(bits: int) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which codes of `bits` bits and their zero points are stored."""
    if bits <= _SIGNED_BITS:
        return torch.int8, torch.int8
    return torch.uint8, torch.int16


def quantize_asymmetric(
    matrix: torch.Tensor,
    bits: int,
    group: int | None = 128,
    share: float | torch.Tensor = 1.0,
    scale_type: torch.dtype = torch.float16,
) -> Operand:
    """Quantize [rows, K] to unsigned codes with one scale and one zero point per group.

    group: values of k that share them; None: a row. The last group may be shorter.
    share: of a group's range that the codes span; a tensor [rows, groups, 2]: of each group's parts
    below and above 0.
    Raises ShapeError and ValueError as `quantize_symmetric`.
    """
    low, high = code_limits(bits)
    top = high - low
    check_matrix(matrix, group)
    rows, k = matrix.shape
    grouped = in_groups(matrix.to(work_dtype(matrix)), group)
    scales, zero_points = asymmetric_scaling(grouped, top, share, scale_type)
    nearest = (grouped / safe_divisor(scales, grouped.dtype)).round_()
    codes = nearest.sub_(zero_points).clamp_(0, top).view(rows, -1)[:, :k]
    code_dtype, zero_dtype = asymmetric_types(bits)
    return Operand(
        codes.to(code_dtype).contiguous(),
        scales.squeeze(2),
        bits,
        group,
        zero_points.squeeze(2).to(zero_dtype),
    )
