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
