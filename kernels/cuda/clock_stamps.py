"""Idle gaps in a stream, and the SM clock between two points of it from the GPU's counters."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Build

BUILD = Build.of("probes/clock.cu")


class ClockStamps:
    """Time stamps of every SM's cycle counter and the GPU's timer, taken in the current stream.

    count: number of spans between two stamps. Taking a stamp (one warp per SM, which writes 16
    bytes) takes about 2 us.
    Raises UnsupportedError without CuPy, KernelError if the launch fails.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._sms = current_gpu().sms
        self._stamps = torch.zeros(count, 2, self._sms, 2, dtype=torch.int64, device=device)
        self._function = load_function(BUILD, "pause_and_stamp")

    def begin(self, span: int, pause_us: float = 0.0) -> None:
        """Enqueue an idle gap and then the first stamp of a span."""
        self._take(self._stamps[span, 0], pause_us)

    def end(self, span: int, pause_us: float = 0.0) -> None:
        """Enqueue an idle gap and then the second stamp of a span."""
        self._take(self._stamps[span, 1], pause_us)

    def clocks_mhz(self) -> list[float | None]:
        """Return the median SM clock of each span in MHz; call after synchronizing the stream."""
        stamps = self._stamps.cpu().numpy()
        return clocks_mhz(stamps[:, 0], stamps[:, 1])

    def _take(self, stamp: torch.Tensor, pause_us: float) -> None:
        self._function.launch((self._sms, 1, 1), 32, (stamp, self._sms, round(pause_us)))


def clocks_mhz(first: NDArray[np.int64], second: NDArray[np.int64]) -> list[float | None]:
    """Return the median over SMs of the clock between two stamps.

    first, second: [spans, SMs, 2], cycles and ns; zeros where no block ran on an SM. Result:
    [spans], MHz; None: no SM has both stamps.
    """
    cycles, ns = np.moveaxis(second - first, -1, 0)
    both = (first[..., 1] > 0) & (second[..., 1] > 0) & (ns > 0)
    mhz = 1000.0 * cycles / np.where(both, ns, 1)
    return [
        float(np.median(clocks[valid])) if valid.any() else None
        for clocks, valid in zip(mhz, both, strict=True)
    ]
