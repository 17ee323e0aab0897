"""The NVML readings of a measurement. No setting of a device is ever changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def open_handle(device: torch.device) -> Nvml | None:
    """NVML handle of a device; None: a CPU, or NVML is missing or doesn't know the device."""
    if device.type == "cpu":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        pynvml.nvmlInit()
        handle = _handle(pynvml, str(properties.uuid))
    except pynvml.NVMLError:
        return None
    return Nvml(pynvml, handle)


def _handle(pynvml: Any, uuid: str) -> Any:
    # torch counts only visible devices and NVML all of them, so an index would name another GPU.
    prefixed = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(prefixed)
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{prefixed[4:]}")


class Nvml:
    """Readings of one device. Each is None if the device or the driver doesn't offer it."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml = pynvml
        self._handle = handle

    def sm_clock_mhz(self) -> float | None:
        return self._number("nvmlDeviceGetClockInfo", self._pynvml.NVML_CLOCK_SM)

    def mem_clock_mhz(self) -> float | None:
        return self._number("nvmlDeviceGetClockInfo", self._pynvml.NVML_CLOCK_MEM)

    def default_sm_clock_mhz(self) -> float | None:
        """Default clock of the device: the applications clock, otherwise the highest."""
        default = self._number(
            "nvmlDeviceGetDefaultApplicationsClock", self._pynvml.NVML_CLOCK_GRAPHICS
        )
        if default is not None:
            return default
        return self._number("nvmlDeviceGetMaxClockInfo", self._pynvml.NVML_CLOCK_SM)

    def applications_sm_clock_mhz(self) -> float | None:
        """The applications clock that somebody set."""
        return self._number("nvmlDeviceGetApplicationsClock", self._pynvml.NVML_CLOCK_GRAPHICS)

    def power_w(self) -> float | None:
        return _scaled(self._number("nvmlDeviceGetPowerUsage"), 1000)

    def power_limit_w(self) -> float | None:
        return _scaled(self._number("nvmlDeviceGetEnforcedPowerLimit"), 1000)

    def energy_j(self) -> float | None:
        """Energy used since the driver was loaded."""
        return _scaled(self._number("nvmlDeviceGetTotalEnergyConsumption"), 1000)

    def temperature_c(self) -> float | None:
        return self._number("nvmlDeviceGetTemperature", self._pynvml.NVML_TEMPERATURE_GPU)

    def throttle_mask(self) -> int | None:
        """Bits nvmlClocksEventReason*: idle 1, power cap 4, hardware slowdown 8, thermal 0x20 …"""
        mask = self._call(
            lambda: self._pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        )
        return None if mask is None else int(mask)

    def driver_version(self) -> str | None:
        return self._call(lambda: _text(self._pynvml.nvmlSystemGetDriverVersion()))

    def vbios(self) -> str | None:
        return self._call(lambda: _text(self._pynvml.nvmlDeviceGetVbiosVersion(self._handle)))

    def ecc(self) -> bool | None:
        return self._call(lambda: bool(self._pynvml.nvmlDeviceGetEccMode(self._handle)[0]))

    def mig(self) -> bool | None:
        return self._call(lambda: bool(self._pynvml.nvmlDeviceGetMigMode(self._handle)[0]))

    def compute_pids(self) -> tuple[int, ...] | None:
        """Processes with a context on the device, as numbered outside any container."""
        return self._call(
            lambda: tuple(
                int(process.pid)
                for process in self._pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            )
        )

    def _number(self, function: str, *arguments: Any) -> float | None:
        return self._call(lambda: float(getattr(self._pynvml, function)(self._handle, *arguments)))

    def _call(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (self._pynvml.NVMLError, AttributeError):
            return None


def _scaled(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
