"""Peak memory of an operation."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets the peak of the resident set
_KIB = 1 << 10
# glibc's mallopt(3): allocations of at least this many bytes are mapped, and unmapped when they are
# freed.
_M_MMAP_THRESHOLD = -3
_MIN_MAPPED_BYTES, _MAX_AUTOMATIC_BYTES = 256 << 10, 32 << 20


class PeakMemory:
    """Context that measures bytes of tensors on a GPU, or the growth of the process's resident set.

    bytes: the peak, after the block. meaning: what was measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes = 0
        self.meaning = (
            "of tensors on the GPU"
            if device.type == "cuda"
            else "growth of the resident set while weights were read, quantized and written"
        )

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return self
        release_free_memory()  # free memory of earlier work would hide growth
        # not Linux, or not permitted: the peak since the start of the process counts
        with contextlib.suppress(OSError):
            _RESET.write_text(_RESET_PEAK)
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device)
        else:
            self.bytes = max(0, _status("VmHWM") - self._before)


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status; elsewhere the peak that the system reports."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * _KIB


def release_free_memory() -> None:
    """Return free heap memory to the system, which glibc does only partly by itself."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@contextlib.contextmanager
def freed_at_once(device: torch.device) -> Iterator[None]:
    """Context in which freed CPU tensors are returned to the system at once.

    Otherwise glibc raises its threshold for that to the largest freed size, and temporary tensors
    leave holes in the heap: twice a block's weights while it is quantized.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" and device.type == "cpu" else None
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _MIN_MAPPED_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _MAX_AUTOMATIC_BYTES)  # the upper end of glibc's own choice
