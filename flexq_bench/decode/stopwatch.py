"""Milliseconds between marks on a device: CUDA events on a GPU, a monotonic clock on a CPU."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class Stopwatch:
    """Timer on a device. Marks are cheap; reading intervals synchronizes."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times_ns: list[int] = []

    def mark(self) -> None:
        """Add a mark after the work enqueued so far."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times_ns.append(time.perf_counter_ns())

    def intervals_ms(self) -> list[float]:
        """Return the milliseconds between consecutive marks."""
        if self._on_gpu:
            torch.cuda.synchronize()
            return [before.elapsed_time(after) for before, after in pairwise(self._events)]
        return [(after - before) / 1e6 for before, after in pairwise(self._times_ns)]
