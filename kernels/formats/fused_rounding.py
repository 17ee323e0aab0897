"""FlexQ's quantization formula for activations, fused into one Triton kernel.

Unfused, NumberFormat.round is a chain of torch operations with ten passes over GPU memory, which
took half of the evaluation time of a quantized model. Results equal `symmetric_quantization` bit
for bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

LONGEST_GROUP = 8192  # values: a program holds a group in registers
_VALUES_PER_PROGRAM = 2048


def supports(matrix: torch.Tensor) -> bool:
    """Return True if `round_symmetric` supports this matrix: FP16 on a GPU, with Triton."""
    return matrix.is_cuda and matrix.dtype == torch.float16 and _kernel() is not None


def launch_shape(rows: int, k: int, length: int) -> tuple[tuple[int, int], int, int]:
    """Return the grid, block size and rows per program for groups of `length` along K.

    The grid is [programs along rows, groups]; the block size is the length rounded up to a power of
    two.
    """
    block = 1 << (length - 1).bit_length()
    tile_rows = max(1, _VALUES_PER_PROGRAM // block)
    return (-(-rows // tile_rows), -(-k // length)), block, tile_rows


def round_symmetric(
    matrix: torch.Tensor, group: int | None, limits: tuple[int, int], clip: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Round FP16 [rows, K] group by group; return FP32 [rows, K] and FP16 scales [rows, groups].

    limits: lowest and highest code; clip: share of a group's range that the codes span. The scale
    of a group with NaN or infinity is not finite. Returns None if groups exceed LONGEST_GROUP.
    """
    rows, k = matrix.shape
    length = min(group or k, k)
    if length > LONGEST_GROUP:
        return None
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    grid, block, tile_rows = launch_shape(rows, k, length)
    groups = grid[1]
    rounded = torch.empty((rows, k), dtype=torch.float32, device=matrix.device)
    scales = torch.empty((rows, groups), dtype=torch.float16, device=matrix.device)
    kernel: Any = _kernel()
    kernel[grid](
        matrix,
        rounded,
        scales,
        rows,
        k,
        groups,
        matrix.stride(0),
        clip,
        float(limits[1]),
        float(limits[0]),
        length=length,
        block=block,
        tile_rows=tile_rows,
    )
    return rounded, scales


@functools.cache
def _kernel() -> Any:
    """Return the kernel, or None without Triton."""
    try:
        from flexq_bench.kernels.formats.triton_rounding import round_groups
    except ImportError:
        return None
    return round_groups
