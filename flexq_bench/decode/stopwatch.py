"""Milliseconds between marks on a device: CUDA events on a GPU, a monotonic clock on a CPU."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Timer on a device. Marks are cheap; reading intervals synchronizes."""

    def mark(self) -> None:
        """Add a mark after the work enqueued so far."""

    def intervals_ms(self) -> list[float]:
        """Milliseconds between consecutive marks."""


def stopwatch(device: torch.device) -> Stopwatch:
    """Create the stopwatch of a device."""
    return _CudaStopwatch() if device.type == "cuda" else _CpuStopwatch()


class _CpuStopwatch:
    def __init__(self) -> None:
        self._marks: list[int] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter_ns())

    def intervals_ms(self) -> list[float]:
        return [(after - before) / 1e6 for before, after in pairwise(self._marks)]


class _CudaStopwatch:
    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def intervals_ms(self) -> list[float]:
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(self._marks)]
