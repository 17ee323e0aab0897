"""Timing the candidates of a kernel: briefly, on the buffers that are measured afterwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from enum import StrEnum

from flexq_bench.measure.clocks import Clock
from flexq_bench.measure.protocol import Protocol
from flexq_bench.measure.sampling import warm_up
from flexq_bench.measure.subject import Buffers
from kernels.autotune import TuningMemory, tuning_folder
from kernels.contract import Config

_SAMPLES = 7  # of each candidate: enough to tell percents apart, not tenths


class Tuning(StrEnum):
    """Where a configuration comes from."""

    REMEMBERED = "remembered"  # timed once for a GPU, sources and shape, then read from disk
    FRESH = "fresh"  # timed anew in this process, and remembered
    NONE = "none"  # the kernel's own heuristic

    def memory(self) -> TuningMemory:
        """What is known when a process begins to measure."""
        return TuningMemory(tuning_folder(), fresh=self is Tuning.FRESH)


class BriefTimer:
    """Times configurations over one set of buffers, which it allocates when first called.

    The first call warms the device up as long as a measurement does, so that the candidate that
    happens to be first does not pay for low clocks.
    """

    def __init__(self, place: Callable[[], Buffers], clock: Clock, protocol: Protocol) -> None:
        self._place, self._clock, self._protocol = place, clock, protocol
        self._buffers: Buffers | None = None

    def __call__(self, config: Config) -> float:
        phase = self._protocol.retune
        if self._buffers is None:
            self._buffers = self._place()
            phase = self._protocol.warm_up
        buffers = self._buffers
        rotation = self._clock.rotation(buffers.bound(config), buffers.copies, self._protocol)
        try:
            warm_up(rotation, phase, self._protocol.batch_s, time.perf_counter)
            return statistics.median(rotation.sample(_SAMPLES))
        finally:
            rotation.close()
