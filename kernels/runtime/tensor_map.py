"""Tensor maps: descriptors of matrices for TMA (compute capability 9.0 and later)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from kernels.errors import KernelError
from kernels.runtime.driver import cuda_driver

_ALIGNMENT = 64  # of an encoded map, by the driver's reference
_WORDS = 16
_UINT8, _UINT64 = 0, 4  # of the driver's enumerations
_NO_SWIZZLE, _SWIZZLE_128B = 0, 3
_PROMOTION_L2_256B = 3
_ELEMENT_BYTES = {_UINT8: 1, _UINT64: 8}


@dataclass(frozen=True, slots=True)
class TensorMap:
    """An encoded map, a kernel's __grid_constant__ argument; the memory stays its tensor's."""

    words: tuple[int, ...]


NO_MAP = TensorMap((0,) * _WORDS)  # for a kernel that reads none there


def swizzled_rows(codes: torch.Tensor, box_rows: int, box_bytes: int) -> TensorMap:
    """The map of a contiguous matrix [rows, bytes] in boxes, 128-byte swizzled.

    Rows past the last are zeros. Raises KernelError if the driver refuses, UnsupportedError without
    a driver.
    """
    rows, row_bytes = codes.shape
    return _encoded(codes.data_ptr(), rows, row_bytes, box_rows, box_bytes, _UINT8, _SWIZZLE_128B)


def plain_rows(words: torch.Tensor, box_rows: int, box_bytes: int) -> TensorMap:
    """The same of a matrix whose first dimension are rows, without a swizzle.

    Boxes are up to 2 KB by 256 rows, a multiple of 16 bytes.
    """
    rows = words.shape[0]
    row_bytes = words.numel() * words.element_size() // rows
    return _encoded(words.data_ptr(), rows, row_bytes, box_rows, box_bytes, _UINT64, _NO_SWIZZLE)


@lru_cache(maxsize=4096)
def _encoded(
    address: int, rows: int, row_bytes: int, box_rows: int, box_bytes: int, kind: int, swizzle: int
) -> TensorMap:
    room = (ctypes.c_uint64 * (_WORDS + _ALIGNMENT // 8))()
    offset = -ctypes.addressof(room) % _ALIGNMENT
    words = (ctypes.c_uint64 * _WORDS).from_buffer(room, offset)
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
