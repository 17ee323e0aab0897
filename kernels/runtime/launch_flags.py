"""Flags in memory between blocks of one launch: release and acquire of what a block wrote.

A flag is set to a number that no other launch on the same flags has, so nobody resets one and it
doesn't matter what an aborted launch left. A stream has flags of its own. So has each capture of a
stream in a CUDA graph: replays have the numbers that were captured, and each begins by setting the
flags to zero. So whatever may run at the same time has flags of its own; a graph never runs twice
at the same time, and graphs that share a memory pool must not either, as for all their memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.errors import KernelError
from kernels.runtime.driver import cuda_driver

_NUMBERS = range(1, 1 << 31)  # of launches, until flags begin anew
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@dataclass(frozen=True, slots=True)
class _Flags:
    """capture: the driver's number of it; None: these are not for a graph."""

    capture: int | None
    words: torch.Tensor
    numbers: Iterator[int]


_KEPT: dict[tuple[torch.device, int, int], _Flags] = {}


def launch_flags(count: int) -> tuple[torch.Tensor, int]:
    """Flags int32 [count] for one launch on torch's current stream, and the number that sets them.

    Raises KernelError if the driver can't tell whether the stream is being captured,
    UnsupportedError without a driver.
    """
    device, stream = _current_stream()
    capture = _capture_of(stream)
    kept = _KEPT.get((device, stream, count))
    if kept is not None and kept.capture == capture:
        number = next(kept.numbers, None)
        if number is not None:
            return kept.words, number
    kept = _Flags(capture, torch.zeros(count, dtype=torch.int32, device=device), iter(_NUMBERS))
    number = next(kept.numbers)
    _KEPT[device, stream, count] = kept
    return kept.words, number


def _current_stream() -> tuple[torch.device, int]:
    stream = torch.cuda.current_stream()
    return stream.device, stream.cuda_stream


def _capture_of(stream: int) -> int | None:
    """Unique in this process; None: the stream is not being captured."""
    status, capture = ctypes.c_int(), ctypes.c_uint64()
    # Without dependencies: they are refused where one is a programmatic dependent launch.
    error = cuda_driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture), None, None, None
    )
    if error != 0:
        raise KernelError(f"cuStreamGetCaptureInfo failed with {error}")
    return capture.value if status.value == _CAPTURING else None
