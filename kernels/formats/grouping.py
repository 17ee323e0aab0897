"""Grouping along K and checks of a matrix, common to all number formats."""

from __future__ import annotations

import torch

from flexq_bench.kernels.errors import ShapeError

_EXACT_IN_FP32 = (torch.float16, torch.bfloat16)


def work_dtype(matrix: torch.Tensor) -> torch.dtype:
    """Return the dtype in which division by an FP16 scale never rounds across a tie."""
    return torch.float32 if matrix.dtype in _EXACT_IN_FP32 else torch.float64


def check_matrix(matrix: torch.Tensor, group: int | None) -> None:
    """Check shape and values. Raises ShapeError as `check_shape`, ValueError as `check_finite`."""
    check_shape(matrix, group)
    check_finite(matrix)


def check_shape(matrix: torch.Tensor, group: int | None) -> None:
    """Check a matrix and a group size. Raises ShapeError for an empty matrix or group."""
    if group is not None and group < 1:
        raise ShapeError(f"a group needs at least one value, got {group}")
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ShapeError(f"need a matrix with at least one value, got {tuple(matrix.shape)}")


def check_finite(matrix: torch.Tensor) -> None:
    """Check that all values are finite. Raises ValueError for NaN and infinity."""
    # A NaN would be both extremes. In a seventh of the time of isfinite on all values.
    if matrix.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(matrix))).all()):
        raise ValueError("cannot quantize NaN or infinity: find out where the input got them")


def in_groups(matrix: torch.Tensor, group: int | None, block_rows: int | None = 1) -> torch.Tensor:
    """Reshape [rows, K] to [row blocks, groups, values of a block], padded with zeros.

    group, block_rows: columns and rows of a block; None: all.
    """
    rows, k = matrix.shape
    width, height = group or k, block_rows or rows
    if k % width or rows % height:
        matrix = torch.nn.functional.pad(matrix, (0, -k % width, 0, -rows % height))
    blocks = matrix.reshape(-1, height, matrix.shape[1] // width, width)
    return blocks.transpose(1, 2).flatten(2)


def safe_divisor(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales to divide by, zeros replaced by infinity: such groups get codes of zero."""
    return scales.to(dtype).masked_fill(scales == 0, torch.inf)  # torch.where would synchronize
