"""Timing a rotation of launches: CUDA graphs and events on a GPU, a monotonic clock on a CPU."""

from __future__ import annotations

import math
import random
import resource
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from flexq_bench.kernels.cuda.block_order import BlockShuffle
from flexq_bench.kernels.cuda.clock_stamps import ClockStamps
from flexq_bench.kernels.runtime.driver import reset_persisting_l2
from flexq_bench.kernels.runtime.graph_capture import captured
from flexq_bench.measure.protocol import Protocol

Launch = Callable[[int], None]  # launch(i) runs on the i-th copy of the weights, i < copies
_CALIBRATION_SAMPLES = 3
_MAX_FITTINGS = 3
_MIN_LAUNCH_RATIO = 1.25  # ratio of launches below which a new graph is not worthwhile
_MAX_KEPT_SAMPLES = 16  # samples of a batch whose outputs are kept
# The clock of a GPU without load is the highest of many pauses. It is known when this many agree,
# because an idle GPU raises its clock only after some tens of milliseconds.
_CLOCK_PAUSES, _PAUSE_US, _MAX_CLOCK_DIFFERENCE = 8, 2000.0, 0.002
_MIN_CLOCK_S, _MAX_CLOCK_S = 0.1, 0.5


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that were taken together, in the order measured.

    times_us: microseconds per launch. sm_mhz: SM clock during each; None: not available.
    """

    times_us: tuple[float, ...]
    sm_mhz: tuple[float | None, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)


class BetweenSamples:
    """Hooks that run between samples, outside the time of each. Here they do nothing.

    On a GPU the device operations of these methods are queued on the stream of the launches, and
    the host doesn't wait for them.
    """

    keeps_outputs = False  # True if the outputs of some samples are kept

    def begin_launches(self, count: int) -> None:
        """Prepare for the launches of one sample. A GPU captures them in a graph once."""

    def captures_kept_first(self) -> bool:
        """Draw at random which graph is captured first: True for that of samples with kept outputs.

        A launch function on the host sees only captures, and must not know which one is timed.
        """
        return False

    def after_launch(self) -> None:
        """Called after each launch of a sample with kept outputs (on a GPU, after queueing it)."""

    def begin_batch(self, count: int) -> None:
        """Called before a batch of this many samples; the device is idle."""

    def before_sample(self, *, last_copy: int | None = None) -> None:
        """Called before each sample, and before the untimed launches at the start of a batch.

        last_copy: of the weights, which the last launch of a batch reads; None: it is not in this
        sample.
        """

    def keep_samples(self, count: int) -> None:
        """Keep the outputs of so many samples in the next batch, not of a number drawn there."""

    def kept_before(self, index: int) -> int:
        """Number of untimed samples with kept outputs that precede sample `index` of a batch.

        A kernel can't distinguish them from the others: they have the same launches on the same
        addresses. After one of them it can't know whether another one follows (see draw_kept).
        """
        return 0

    def after_kept_sample(self) -> None:
        """Called after a sample with kept outputs (on a GPU, after queueing it)."""


def draw_kept(draw: random.Random) -> int:
    """Draw the number of samples with kept outputs of a batch: tosses before the first tail.

    However many there were, the chance that another one follows is 1/2. On average it is one.
    """
    tosses = range(_MAX_KEPT_SAMPLES)  # an end, even if somebody replaced the function that draws
    return next((kept for kept in tosses if draw.random() >= 0.5), _MAX_KEPT_SAMPLES)


@dataclass(frozen=True, slots=True)
class TimedLaunches:
    """Launches over copies of the weights, and the hooks between their samples.

    count: of a sample, if known from other buffers; None: determined by timing.
    """

    launch: Launch
    copies: int
    protocol: Protocol
    between: BetweenSamples
    count: int | None


class Rotation(ABC):
    """Launches over copies 0, 1, …, copies - 1, 0, … that are timed together.

    launches: in one sample. On a GPU at least one pass over the copies. A CPU continues where the
    last sample ended, so each launch still uses the least recently used copy.
    """

    launches: int

    def __init__(self, timed: TimedLaunches) -> None:
        self._launch, self._copies, self._between = timed.launch, timed.copies, timed.between

    @abstractmethod
    def sample(self, count: int, *, gap_us: float | None = 0.0) -> Batch:
        """Take `count` samples; all work is finished on return.

        gap_us: idle time of the device before each; before that, each sample of a GPU gets a random
        block order (see kernels.cuda.block_order). None: steady load, without either. A CPU's
        samples have no gaps.
        """

    def repeated_us(self, launches: int) -> float | None:
        """Microseconds of CPU time per launch, for the first launches, without hooks before them.

        CPU time excludes the time of other processes. If a launch waits, the elapsed time counts.
        None if launches are a graph, because no host code runs between them.
        """
        return None

    def close(self) -> None:
        """Release the launches and the buffers that they use."""
        del self._launch, self._between


class Clock(ABC):
    """Creates rotations on one device and reads its time."""

    def rotation(
        self,
        launch: Launch,
        copies: int,
        protocol: Protocol,
        between: BetweenSamples | None = None,
        launches: int | None = None,
    ) -> Rotation:
        """A rotation whose samples have the protocol's length. Runs the launches a few times.

        launches: of a sample, if known from other buffers; None: determined by timing.
        """
        return self._rotation(
            TimedLaunches(launch, copies, protocol, between or BetweenSamples(), launches)
        )

    @abstractmethod
    def _rotation(self, timed: TimedLaunches) -> Rotation: ...

    @abstractmethod
    def free_mhz(self) -> float | None:
        """SM clock of the device without load; None: not available."""

    @abstractmethod
    def device_guard(self) -> AbstractContextManager[object]:
        """Make the clock's device the current one."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device. Raises RuntimeError if the device is broken."""

    @abstractmethod
    def release_memory(self) -> None:
        """Return freed buffers to the driver, so that the next ones get other addresses."""


class CpuClock(Clock):
    """Host time around launches that are finished when they return, on one thread.

    With more threads than idle cores each launch would wait for a time slice of milliseconds, and
    the number of idle cores is not under our control.
    """

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns

    def _rotation(self, timed: TimedLaunches) -> Rotation:
        return _CpuRotation(timed, self._now_ns)

    def free_mhz(self) -> float | None:
        return None

    @contextmanager
    def device_guard(self) -> Iterator[None]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def synchronize(self) -> None:
        """A CPU's work is finished when the call returns."""

    def release_memory(self) -> None:
        """A CPU's memory is returned when it is freed."""


class _CpuRotation(Rotation):
    def __init__(self, timed: TimedLaunches, now_ns: Callable[[], int]) -> None:
        super().__init__(timed)
        self._now_ns = now_ns
        self._next = 0
        self.launches = timed.count or 1
        if timed.count is None:
            launch_us = self.sample(_CALIBRATION_SAMPLES).median_us
            self.launches = _launches_for(launch_us, 1, timed.protocol)

    def sample(self, count: int, *, gap_us: float | None = 0.0) -> Batch:
        times = []
        self._between.begin_batch(count)
        for index in range(count):
            for _ in range(self._between.kept_before(index)):
                self._begin_sample()
                for i in range(self._next, self._next + self.launches):
                    self._launch(i % self._copies)
                    self._between.after_launch()
                self._between.after_kept_sample()
                self._next = (self._next + self.launches) % self._copies
            self._begin_sample(is_last=index == count - 1)
            start = self._now_ns()
            for i in range(self._next, self._next + self.launches):
                self._launch(i % self._copies)
            elapsed_ns = self._now_ns() - start
            self._next = (self._next + self.launches) % self._copies
            times.append(elapsed_ns / 1000 / self.launches)
        return Batch(tuple(times), (None,) * count)

    def _begin_sample(self, *, is_last: bool = False) -> None:
        self._between.begin_launches(self.launches)
        last_copy = (self._next + self.launches - 1) % self._copies
        self._between.before_sample(last_copy=last_copy if is_last else None)

    def repeated_us(self, launches: int) -> float:
        waits = _times_waited()
        used_ns, elapsed_ns = time.process_time_ns(), time.perf_counter_ns()
        for i in range(launches):
            self._launch(i % self._copies)
        used_ns = time.process_time_ns() - used_ns
        elapsed_ns = time.perf_counter_ns() - elapsed_ns
        # A waiting launch may use other threads or processes, so its CPU time is incomplete.
        return (elapsed_ns if _times_waited() > waits else used_ns) / 1000 / launches


def _times_waited() -> int:
    """Number of times that this thread has waited for an event."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class CudaClock(Clock):
    """Device time between two events around one replay of a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def _rotation(self, timed: TimedLaunches) -> Rotation:
        reset_persisting_l2()  # no advantage from lines that an earlier kernel made persistent
        return _CudaRotation(timed, self._stream)

    def free_mhz(self) -> float | None:
        """Pause until the clock is stable, because an idle GPU raises its clock slowly."""
        clocks: list[float] = []
        began = time.perf_counter()
        while (elapsed := time.perf_counter() - began) < _MAX_CLOCK_S:
            with torch.cuda.stream(self._stream):
                stamps = ClockStamps(_CLOCK_PAUSES, self._device)
                for span in range(_CLOCK_PAUSES):
                    stamps.begin(span)
                    stamps.end(span, pause_us=_PAUSE_US)
            self._stream.synchronize()
            newest = [mhz for mhz in stamps.clocks_mhz() if mhz is not None]
            clocks.extend(newest)
            least = (1 - _MAX_CLOCK_DIFFERENCE) * max(clocks, default=0.0)
            if elapsed >= _MIN_CLOCK_S and all(mhz >= least for mhz in newest):
                break
        return max(clocks, default=None)

    def device_guard(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


class _CudaRotation(Rotation):
    def __init__(self, timed: TimedLaunches, stream: torch.cuda.Stream) -> None:
        super().__init__(timed)
        self._stream, between = stream, timed.between
        self._shuffle = BlockShuffle()
        torch.cuda.synchronize()  # the buffers were filled on another stream
        between.begin_launches(1)
        with torch.cuda.stream(stream):
            timed.launch(0)  # loading a module or creating a handle can't be captured
        stream.synchronize()
        self.launches = timed.count or timed.copies
        self._kept_graph: torch.cuda.CUDAGraph | None = None
        kept_first = between.keeps_outputs and between.captures_kept_first()
        if kept_first and timed.count is not None:
            self._kept_graph = self._capture(between.after_launch)
        self._graph = self._capture()
        if timed.count is None:
            fit_launches(timed.copies, timed.protocol, self._launch_us)
        if between.keeps_outputs and self._kept_graph is None:
            self._kept_graph = self._capture(between.after_launch)
            if kept_first:
                self._graph.reset()
                self._graph = self._capture()

    def _launch_us(self, launches: int) -> float:
        """Capture a graph of this many launches for the samples; return the time per launch."""
        if launches != self.launches:
            self._graph.reset()
            self.launches = launches
            self._graph = self._capture()
        return self.sample(_CALIBRATION_SAMPLES).median_us

    def _capture(self, after_launch: Callable[[], None] | None = None) -> torch.cuda.CUDAGraph:
        self._between.begin_launches(self.launches)
        with captured(self._stream) as graph:
            for i in range(self.launches):
                self._launch(i % self._copies)
                if after_launch is not None:
                    after_launch()
        return graph

    def sample(self, count: int, *, gap_us: float | None = 0.0) -> Batch:
        starts, stops = _timing_events(count), _timing_events(count)
        with torch.cuda.stream(self._stream):
            stamps = ClockStamps(count + 1, self._stream.device)  # one more for untimed samples
            self._between.begin_batch(count)
            # Untimed: after weights were rewritten the first sample is up to 4 % slower. Meanwhile
            # the host queues the others.
            self._between.before_sample()
            self._graph.replay()
            for index, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                if self._kept_graph is not None:  # it is None while launches are fitted
                    for _ in range(self._between.kept_before(index)):
                        self._between.before_sample()
                        self._pause(stamps, count, gap_us)
                        self._kept_graph.replay()
                        stamps.end(count)
                        self._between.after_kept_sample()
                is_last = index == count - 1
                self._between.before_sample(last_copy=self._copies - 1 if is_last else None)
                self._pause(stamps, index, gap_us)
                start.record(self._stream)
                self._graph.replay()
                stop.record(self._stream)
                stamps.end(index)
        self._stream.synchronize()
        times = tuple(
            start.elapsed_time(stop) * 1000 / self.launches
            for start, stop in zip(starts, stops, strict=True)
        )
        return Batch(times, tuple(stamps.clocks_mhz()[:count]))

    def _pause(self, stamps: ClockStamps, span: int, gap_us: float | None) -> None:
        if gap_us is not None:
            self._shuffle.run()
        stamps.begin(span, gap_us or 0.0)

    def close(self) -> None:
        self._stream.synchronize()
        self._graph.reset()
        if self._kept_graph is not None:
            self._kept_graph.reset()
        super().close()


def _timing_events(count: int) -> list[torch.cuda.Event]:
    return [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(count)
    ]


def fit_launches(copies: int, protocol: Protocol, launch_us: Callable[[int], float]) -> None:
    """Give samples the protocol's length.

    launch_us(launches): sets the number of launches of a sample, and returns the time of one, in
    us.

    Starting a graph takes longer than the shortest kernels. A sample of few launches therefore
    overestimates the time of each, and the next sample is still too short: hence more than one
    round.
    """
    launches = copies
    for _ in range(_MAX_FITTINGS):
        target = _launches_for(launch_us(launches), copies, protocol)
        if target <= _MIN_LAUNCH_RATIO * launches:
            return
        launches = target
    launch_us(launches)


def _launches_for(launch_us: float, copies: int, protocol: Protocol) -> int:
    """Launches in a sample: whole passes over the copies that last the target time."""
    target = max(protocol.target_sample_us, protocol.min_sample_us)
    turns = math.ceil(target / max(launch_us * copies, 1e-3))
    return copies * max(1, min(turns, protocol.max_launches // copies))
