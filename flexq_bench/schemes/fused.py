"""Kernels that do in one pass what training would launch dozens of torch's for, where they run."""

from __future__ import annotations

import functools
from typing import Any

import torch


def kernels_for(tensor: torch.Tensor) -> Any:
    """The module triton_kernels for FP32 on a GPU with Triton; None: torch's functions do it."""
    return _kernels() if tensor.is_cuda and tensor.dtype == torch.float32 else None


@functools.cache
def _kernels() -> Any:
    try:
        from flexq_bench.schemes import triton_kernels
    except ImportError:
        return None
    return triton_kernels
