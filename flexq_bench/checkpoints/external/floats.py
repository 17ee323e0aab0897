"""Floating-point codes in checkpoints of other tools: packed bytes, and their scales."""

from __future__ import annotations

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.formats.scales import per_row

_E8M0_NAN = 255  # code of NaN


def unpack_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes from bytes, the lowest bits first: uint8 [N, bytes] to uint8 [N, K].

    A code of 6 bits may cross from one byte into the next, as three bytes hold four of them.
    """
    rows, together = packed.shape[0], {4: 1, 6: 3}[bits]
    parts = packed.view(rows, -1, together).to(torch.int32)
    word = parts[..., 0]
    for i in range(1, together):
        word = word | parts[..., i] << (8 * i)
    codes = [word >> (bits * i) & ((1 << bits) - 1) for i in range(8 * together // bits)]
    return torch.stack(codes, dim=-1).to(torch.uint8).view(rows, -1)


def float_operand(
    values: torch.Tensor,
    scales: torch.Tensor,
    number: NumberFormat,
    *,
    matrix_scale: torch.Tensor | None = None,
) -> Operand:
    """Weights code · scale of a float format.

    values: [N, K], FP8 codes, or uint8 codes of smaller floats. scales: [row blocks, groups].
    matrix_scale: FP32, one value, for E4M3 scales. Raises CheckpointError for NaN.
    """
    if values.dtype == torch.uint8:
        values = number.float_type.numbers().half().to(values.device)[values.int()]
    if bool(torch.isnan(values.float()).any()):
        raise CheckpointError("its weights hold NaN: copy the folder again")
    rows = values.shape[0]
    if number.scale == "fp32":
        scales = scales.float()
    return Operand(
        values,
        per_row(scales, number.block_rows, rows).contiguous(),
        number.bits,
        number.group,
        row_scales=None if matrix_scale is None else matrix_scale.float().expand(rows, 1).clone(),
        element=number.element,
        block_rows=number.block_rows,
    )


def power_scales(stored: torch.Tensor, name: str) -> torch.Tensor:
    """Scales of E8M0 from bytes. Raises CheckpointError for the code of NaN."""
    codes = stored.view(torch.uint8)
    if bool((codes == _E8M0_NAN).any()):
        raise CheckpointError(f"{name} holds NaN: copy it again")
    return codes.view(torch.float8_e8m0fnu)


def small_scales(stored: torch.Tensor, name: str) -> torch.Tensor:
    """Scales of E4M3. Raises CheckpointError for NaN, negative ones, and nothing but zeros."""
    wide = stored.float()
    if bool(torch.isnan(wide).any()) or bool((wide < 0).any()):
        raise CheckpointError(f"{name} holds NaN or negative scales: copy it again")
    if not bool(wide.any()):
        raise CheckpointError(f"{name} holds nothing but zeros: copy it again")
    return stored


def dequantized(values: torch.Tensor) -> Operand:
    """Weights in a format that has no codes here, as the numbers that they stand for, in FP32."""
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError("its weights hold NaN or infinity: copy the folder again")
    return Operand(values.to(torch.float32).contiguous(), None, 32, None)
