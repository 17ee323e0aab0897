"""Tensor maps: descriptors of matrices for TMA, from compute capability 9.0 on."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.runtime.driver import cuda_driver

_ALIGNMENT = 64  # bytes, of an encoded map (CUDA driver API, cuTensorMapEncodeTiled)
_WORDS = 16
_UINT8, _UINT64 = 0, 4  # CUtensorMapDataType
_NO_SWIZZLE, _SWIZZLE_128B = 0, 3
_PROMOTION_L2_256B = 3
_ELEMENT_BYTES = {_UINT8: 1, _UINT64: 8}


@dataclass(frozen=True, slots=True)
class TensorMap:
    """An encoded map, a kernel's __grid_constant__ argument. Does not keep its tensor alive."""

    words: tuple[int, ...]


NO_MAP = TensorMap((0,) * _WORDS)  # for a parameter that the kernel does not read


def swizzled_rows(codes: torch.Tensor, box_rows: int, box_bytes: int) -> TensorMap:
    """Encode the map of a contiguous matrix [rows, bytes] with 128-byte swizzled boxes.

    Rows past the end read as zeros. Raises KernelError if the driver call fails, UnsupportedError
    without a driver.
    """
    rows, row_bytes = codes.shape
    return _encoded(codes.data_ptr(), rows, row_bytes, box_rows, box_bytes, _UINT8, _SWIZZLE_128B)


def plain_rows(words: torch.Tensor, box_rows: int, box_bytes: int) -> TensorMap:
    """Encode the map of a contiguous tensor [rows, ...] without a swizzle; errors as swizzled_rows.

    box_rows: at most 256. box_bytes: a multiple of 16, at most 2 KB.
    """
    rows = words.shape[0]
    row_bytes = words.numel() * words.element_size() // rows
    return _encoded(words.data_ptr(), rows, row_bytes, box_rows, box_bytes, _UINT64, _NO_SWIZZLE)


@lru_cache(maxsize=4096)
def _encoded(
    address: int, rows: int, row_bytes: int, box_rows: int, box_bytes: int, kind: int, swizzle: int
) -> TensorMap:
    storage = (ctypes.c_uint64 * (_WORDS + _ALIGNMENT // 8))()
    offset = -ctypes.addressof(storage) % _ALIGNMENT
    words = (ctypes.c_uint64 * _WORDS).from_buffer(storage, offset)
    size = _ELEMENT_BYTES[kind]
    status = cuda_driver().cuTensorMapEncodeTiled(
        words,
        kind,
        ctypes.c_uint32(2),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(row_bytes // size, rows),
        (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(box_bytes // size, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        swizzle,
        _PROMOTION_L2_256B,
        0,
    )
    if status != 0:
        raise KernelError(f"cuTensorMapEncodeTiled failed with {status}")
    return TensorMap(tuple(words))
