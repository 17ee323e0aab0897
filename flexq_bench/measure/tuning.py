"""Brief timing of a kernel's candidates, on the buffers that are measured afterwards.

kernels/autotune.py chooses by these times. `Tuning` is the source of a measured configuration.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

from flexq_bench.kernels.autotune import TuningMemory, tuning_folder
from flexq_bench.kernels.contract import Config
from flexq_bench.measure.buffers import Buffers
from flexq_bench.measure.clocks import Clock
from flexq_bench.measure.protocol import Protocol, WarmUp
from flexq_bench.measure.sampling import warm_up
from flexq_bench.workloads.case import Regime

_SAMPLES = 7  # of each candidate near the best: enough to distinguish percents, not tenths
_COARSE_SAMPLES = 3  # samples of every candidate in the coarse pass
_MIN_COARSE_US = 100.0  # least length of one; if weights rotate, a pass over them is longer


class Tuning(StrEnum):
    """Source of a configuration."""

    REMEMBERED = "remembered"  # timed once for a GPU, sources and shape, then read from disk
    FRESH = "fresh"  # timed anew in this process, and stored
    NONE = "none"  # the kernel's default_config, without timing

    def memory(self) -> TuningMemory:
        """Return the initial tuning memory of a process."""
        return TuningMemory(tuning_folder(), fresh=self is Tuning.FRESH)


class BriefTimer:
    """Times configurations over one set of buffers, which are allocated on first use.

    place: allocates them. regime: of the case: under `boost` samples have its first gaps. warm: the
    device was just busy. Otherwise a warm-up as long as that of a measurement precedes the first
    configuration, so that low clocks do not affect its time.
    """

    def __init__(
        self,
        place: Callable[[], Buffers],
        clock: Clock,
        protocol: Protocol,
        *,
        regime: Regime = "boost",
        warm: bool = False,
    ) -> None:
        self._place, self._clock, self._protocol = place, clock, protocol
        self._gap = protocol.gaps[0] if regime == "boost" else 0.0
        self._first = protocol.rewarm if warm else protocol.warm_up
        self._buffers: Buffers | None = None

    def __call__(self, config: Config) -> float:
        """Microseconds per launch under the configuration: the median of samples after settling."""
        return self._time(config, self._protocol, self._protocol.retune, _SAMPLES)

    def glance(self, config: Config) -> float:
        """The same with an error of one or two percent, in a tenth of the time: samples are short
        and few.
        """
        brief = replace(
            self._protocol, target_sample_us=_MIN_COARSE_US, min_sample_us=_MIN_COARSE_US
        )
        return self._time(config, brief, None, _COARSE_SAMPLES)

    def _time(
        self, config: Config, protocol: Protocol, phase: WarmUp | None, samples: int
    ) -> float:
        if self._buffers is None:
            self._buffers, phase = self._place(), self._first
        buffers = self._buffers
        rotation = self._clock.rotation(buffers.bound(config), buffers.copies, protocol)
        try:
            if phase is None:
                sample_us = rotation.sample(1).median_us * rotation.launches
            else:
                batch_s = protocol.retune.min_s
                warmed = warm_up(rotation, phase, batch_s, time.perf_counter, gap=self._gap)
                sample_us = 1e6 * warmed.sample_s
            return rotation.sample(samples, gap_us=self._gap * sample_us).median_us
        finally:
            rotation.close()
