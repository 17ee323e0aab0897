"""NVIDIA's driver library through ctypes, for calls that its Python bindings do not cover."""

from __future__ import annotations

import ctypes
from functools import cache

from flexq_bench.kernels.errors import UnsupportedError


@cache
def cuda_driver() -> ctypes.CDLL:
    """Load libcuda. Raises UnsupportedError on a machine without NVIDIA's driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError("this needs NVIDIA's driver: libcuda.so.1") from error


def reset_persisting_l2() -> None:
    """Reset all persisting lines of the L2 cache to normal, in the current context.

    No effect before compute capability 8.0.
    """
    cuda_driver().cuCtxResetPersistingL2Cache()
