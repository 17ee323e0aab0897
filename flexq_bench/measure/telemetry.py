"""State of the device during a measurement: clocks, power, temperature, throttle reasons."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any, Protocol

from flexq_bench.measure.nvml import Nvml


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One reading. MHz, MHz, W, °C, NVML's bit mask and J since the driver was loaded.

    None: not available.
    """

    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle_mask: int | None = None
    energy_j: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Sensor(Protocol):
    """Source of device readings."""

    default_sm_clock_mhz: float | None

    def read(self) -> DeviceState:
        """The state now."""


class NoSensor:
    """A device without readings, for example a CPU."""

    default_sm_clock_mhz: float | None = None

    def read(self) -> DeviceState:
        return DeviceState()


class NvmlSensor:
    """A GPU's state through NVML."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self.default_sm_clock_mhz: float | None = nvml.default_sm_clock_mhz()

    def read(self) -> DeviceState:
        return DeviceState(
            sm_clock_mhz=self._nvml.sm_clock_mhz(),
            mem_clock_mhz=self._nvml.mem_clock_mhz(),
            power_w=self._nvml.power_w(),
            temperature_c=self._nvml.temperature_c(),
            throttle_mask=self._nvml.throttle_mask(),
            energy_j=self._nvml.energy_j(),
        )


class SmClockSensor(NvmlSensor):
    """A GPU's SM clock alone: one of six readings, each of which takes up to a millisecond."""

    def read(self) -> DeviceState:
        return DeviceState(sm_clock_mhz=self._nvml.sm_clock_mhz())


class Telemetry:
    """Reads a sensor before, after and, on a thread, while its `with` block runs."""

    def __init__(
        self,
        sensor: Sensor,
        *,
        period_s: float,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sensor = sensor
        self._now = now
        self._period_s = period_s
        self._readings: list[tuple[float, DeviceState]] = []
        self._used: list[DeviceState] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.before: DeviceState | None = None
        self.after: DeviceState | None = None

    def __enter__(self) -> Telemetry:
        self.before = self._sensor.read()
        if self._sensor.default_sm_clock_mhz is not None:
            self._thread = threading.Thread(target=self._watch, name="telemetry", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.after = self._sensor.read()

    def note(self, start: float, stop: float) -> None:
        """Record that samples were taken from start to stop (host seconds): `summary` covers these
        times.
        """
        self._used.extend(
            state for time_s, state in list(self._readings) if start <= time_s <= stop
        )

    def mean_power_w(self, start: float, stop: float) -> float | None:
        """Mean power from start to stop (host seconds); None: not available.

        From the energy counter, between its first and its last change, because it is updated less
        often than it is read. Otherwise the median of the power readings.
        """
        during = [
            (time_s, state) for time_s, state in list(self._readings) if start <= time_s <= stop
        ]
        steps: list[tuple[float, float]] = []
        for (_, before), (time_s, state) in pairwise(during):
            if None not in (before.energy_j, state.energy_j) and state.energy_j != before.energy_j:
                steps.append((time_s, state.energy_j or 0.0))
        if len(steps) > 1:
            (first_s, first_j), (last_s, last_j) = steps[0], steps[-1]
            return (last_j - first_j) / (last_s - first_s)
        return _median(state.power_w for _, state in during)

    def summary(self) -> DeviceState:
        """Medians during the samples; every throttle reason seen; the highest temperature.

        If the samples took less time than the interval of readings, those before and after are
        used.
        """
        used = self._used or [state for state in (self.before, self.after) if state is not None]
        temperatures = _present(s.temperature_c for s in used)
        masks = [s.throttle_mask for s in used if s.throttle_mask is not None]
        return DeviceState(
            sm_clock_mhz=_median(s.sm_clock_mhz for s in used),
            mem_clock_mhz=_median(s.mem_clock_mhz for s in used),
            power_w=_median(s.power_w for s in used),
            temperature_c=max(temperatures) if temperatures else None,
            throttle_mask=reduce(or_, masks) if masks else None,
        )

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            self._readings.append((self._now(), self._sensor.read()))


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    present = _present(values)
    return statistics.median(present) if present else None
