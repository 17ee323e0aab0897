"""FlexQ's quantization formula for activations in one pass over GPU memory, by Triton.

What NumberFormat.round computes takes ten passes as a chain of torch's operations, half of the
time that a quantized model takes to evaluate. Bit for bit the numbers of `symmetric_quantization`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

LONGEST_GROUP = 8192  # values that a program holds in registers
_VALUES_A_PROGRAM = 2048


def takes(matrix: torch.Tensor) -> bool:
    """True if `round_symmetric` can round this matrix: FP16 on a GPU, with Triton."""
    return matrix.is_cuda and matrix.dtype == torch.float16 and _kernel() is not None


def launch_shape(rows: int, k: int, length: int) -> tuple[tuple[int, int], int, int]:
    """Grid, block and rows of one program for a kernel over groups of `length` along K.

    The grid is blocks of rows times groups; a block is the next power of two of the length.
    """
    block = 1 << (length - 1).bit_length()
    together = max(1, _VALUES_A_PROGRAM // block)
    return (-(-rows // together), -(-k // length)), block, together


def round_symmetric(
    matrix: torch.Tensor, group: int | None, limits: tuple[int, int], clip: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """FP16 [rows, K] rounded group by group, and the scales: FP32 [rows, K], FP16 [rows, groups].

    limits: lowest and highest code; clip: share of a group's range that the codes span. A group
    with NaN or infinity has such a scale. None: a group is longer than a program takes.
    """
    rows, k = matrix.shape
    length = min(group or k, k)
    if length > LONGEST_GROUP:
        return None
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    grid, block, together = launch_shape(rows, k, length)
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
        together=together,
    )
    return rounded, scales


@functools.cache
def _kernel() -> Any:
    """The kernel, or None where there is no Triton."""
    try:
        from kernels.formats.triton_rounding import round_groups
    except ImportError:
        return None
    return round_groups
