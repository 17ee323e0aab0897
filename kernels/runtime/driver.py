"""NVIDIA's driver library, for calls that its Python bindings lack or leave no choice in."""

from __future__ import annotations

import ctypes
from functools import cache

from kernels.errors import UnsupportedError


@cache
def cuda_driver() -> ctypes.CDLL:
    """libcuda. Raises UnsupportedError on a machine without NVIDIA's driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError("this needs NVIDIA's driver: libcuda.so.1") from error


def reset_persisting_l2() -> None:
    """Let the L2 cache evict lines that an access policy had it keep, in the current context.

    Of no effect on a GPU that keeps none (before compute capability 8.0).
    """
    cuda_driver().cuCtxResetPersistingL2Cache()
