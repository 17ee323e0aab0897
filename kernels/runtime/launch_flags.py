"""Flags in global memory that synchronize the blocks of one launch by release and acquire.

Each launch sets a flag to a number that no other launch on the same flags has. Flags are therefore
never reset, and values that an aborted launch left are harmless. Each stream has its own flags, and
so has each capture of a stream in a CUDA graph: replays reuse the captured numbers, and each begins
by setting the flags to zero. Launches that may run at the same time thus never share flags. A graph
never runs twice at the same time, and graphs that share a memory pool must not run concurrently.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.runtime.driver import cuda_driver

_NUMBERS = range(1, 1 << 31)  # of launches; then new flags are allocated
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@dataclass(frozen=True, slots=True)
class _Flags:
    """Flags of a stream. capture: the driver's id of the capture; None: not captured."""

    capture: int | None
    words: torch.Tensor
    numbers: Iterator[int]


_BY_STREAM: dict[tuple[torch.device, int, int], _Flags] = {}


def launch_flags(count: int) -> tuple[torch.Tensor, int]:
    """Return flags int32 [count] for one launch on the current stream, and its number.

    Raises KernelError if the driver can't query the capture status, UnsupportedError without a
    driver.
    """
    device, stream = _current_stream()
    capture = _capture_id(stream)
    flags = _BY_STREAM.get((device, stream, count))
    if flags is not None and flags.capture == capture:
        number = next(flags.numbers, None)
        if number is not None:
            return flags.words, number
    flags = _Flags(capture, torch.zeros(count, dtype=torch.int32, device=device), iter(_NUMBERS))
    number = next(flags.numbers)
    _BY_STREAM[device, stream, count] = flags
    return flags.words, number


def _current_stream() -> tuple[torch.device, int]:
    stream = torch.cuda.current_stream()
    return stream.device, stream.cuda_stream


def _capture_id(stream: int) -> int | None:
    """Return the id of the stream's capture, unique in this process; None: not capturing."""
    status, capture = ctypes.c_int(), ctypes.c_uint64()
    # Dependencies are not requested: the driver fails if one is a programmatic dependent launch.
    error = cuda_driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture), None, None, None
    )
    if error != 0:
        raise KernelError(f"cuStreamGetCaptureInfo failed with {error}")
    return capture.value if status.value == _CAPTURING else None
