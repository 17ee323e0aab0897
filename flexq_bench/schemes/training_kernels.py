"""Choice of the fused training kernels: Triton's if they can run, else torch operations."""

from __future__ import annotations

import functools
from typing import Any

import torch


def kernels_for(tensor: torch.Tensor) -> Any:
    """Return the module triton_training for FP32 tensors on a GPU with Triton; None: use torch."""
    return _kernels() if tensor.is_cuda and tensor.dtype == torch.float32 else None


@functools.cache
def _kernels() -> Any:
    try:
        from flexq_bench.schemes import triton_training
    except ImportError:
        return None
    return triton_training
