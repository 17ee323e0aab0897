"""Choosing a configuration by timing the candidates, once per process and shape."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence

from flexq_bench.measure.clocks import Clock
from flexq_bench.measure.protocol import Protocol
from flexq_bench.measure.sampling import warm_up
from flexq_bench.measure.subject import Buffers
from kernels.contract import Config

TimeUs = Callable[[Config], float]
_SAMPLES = 7  # of each candidate: enough to tell percents apart, not tenths


def choose_config(candidates: Sequence[Config], time_us: TimeUs) -> Config:
    """The fastest candidate. One that raises is passed over.

    time_us: microseconds a launch under a configuration.
    Raises ValueError if there is no candidate, and what the last one raised if all do.
    """
    if not candidates:
        raise ValueError("there is no candidate to choose from")
    best: tuple[float, Config] | None = None
    last_error: Exception | None = None
    for config in candidates:
        try:
            microseconds = time_us(config)
        except Exception as error:
            last_error = error
            continue
        if best is None or microseconds < best[0]:
            best = microseconds, config
    if best is None:
        assert last_error is not None  # every candidate raised
        raise last_error
    return best[1]


class TuningMemory:
    """Choices already made in this process, by whatever tells two of them apart."""

    def __init__(self) -> None:
        self._chosen: dict[Hashable, Config] = {}

    def choose(self, key: Hashable, candidates: Sequence[Config], time_us: TimeUs) -> Config:
        """The remembered choice of `key`, else choose_config's."""
        if key not in self._chosen:
            self._chosen[key] = choose_config(candidates, time_us)
        return self._chosen[key]


class BriefTimer:
    """Times configurations over one set of buffers, which it allocates when first called.

    The first call warms the device up as long as a measurement does, so that the candidate that
    happens to be first does not pay for low clocks.
    """

    def __init__(self, place: Callable[[], Buffers], clock: Clock, protocol: Protocol) -> None:
        self._place, self._clock, self._protocol = place, clock, protocol
        self._buffers: Buffers | None = None

    def __call__(self, config: Config) -> float:
        phase = self._protocol.rewarm
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
