"""Description of a device, readings of NVML, and telemetry."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from flexq_bench.measure import local_devices
from flexq_bench.measure.device import other_processes
from flexq_bench.measure.nvml import Nvml
from flexq_bench.measure.telemetry import DeviceState, NvmlSensor, Telemetry


class NvmlError(Exception):
    pass


def an_nvml(**functions):
    """A driver that offers only the functions given; the others are not supported."""

    class Driver(SimpleNamespace):
        NVMLError = NvmlError
        NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_CLOCK_GRAPHICS = 1, 2, 0
        NVML_TEMPERATURE_GPU = 0

        def __getattr__(self, name):
            if not name.startswith("nvmlDeviceGet"):
                raise AttributeError(name)

            def unsupported(*_):
                raise NvmlError("Not Supported")

            return unsupported

    return Nvml(Driver(**functions), "handle")


def test_unsupported_readings_are_none():
    nvml = an_nvml()

    assert NvmlSensor(nvml).read() == DeviceState()
    assert NvmlSensor(nvml).default_sm_clock_mhz is None
    assert (nvml.vbios(), nvml.ecc(), nvml.mig(), nvml.power_limit_w()) == (None,) * 4


def test_readings_have_their_units_and_fallbacks():
    nvml = an_nvml(
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetPowerUsage=lambda handle: 312_500,
    )

    assert nvml.default_sm_clock_mhz() == 1980.0  # without a default clock of applications
    assert NvmlSensor(nvml).read().power_w == 312.5


@pytest.mark.parametrize(
    ("pids", "others"),
    [([], 0), ([101], 0), ([101, 102], 1), ([101, 101], 0), (None, None)],
)
def test_other_processes_are_counted_if_the_driver_lists_them(pids, others):
    processes = [SimpleNamespace(pid=pid) for pid in pids or ()]
    listing = {"nvmlDeviceGetComputeRunningProcesses": lambda handle: processes}

    assert other_processes(an_nvml(**({} if pids is None else listing))) == others
    assert other_processes(None) is None


def test_telemetry_reads_before_during_and_after():
    class Counting:
        default_sm_clock_mhz = 2000.0
        reads = 0

        def read(self):
            self.reads += 1
            return DeviceState(sm_clock_mhz=float(self.reads))

    sensor = Counting()
    with Telemetry(sensor, period_s=0.001) as telemetry:
        start = time.perf_counter()
        while sensor.reads < 4:
            time.sleep(0.001)
        stop = time.perf_counter()

    assert telemetry.before.sm_clock_mhz == 1.0
    assert telemetry.after.sm_clock_mhz == sensor.reads >= 5
    telemetry.note(start, stop)
    assert 2.0 <= telemetry.summary().sm_clock_mhz < telemetry.after.sm_clock_mhz


def test_description_of_a_cpu_is_reproducible(a_meter):
    first, second = a_meter(), a_meter()

    assert first.device_info == second.device_info
    assert first.environment == second.environment
    assert first.device_info.backend == first.backend == "cpu"
    assert first.device_info.uuid.startswith("CPU-")
    assert first.capability is None
    assert {"host", "os", "python", "torch"} <= set(first.environment)


def test_gpus_are_described_by_the_driver(monkeypatch):
    class Driver:
        def cuInit(self, flags):  # noqa: N802 (names of CUDA's driver)
            return 0

        def cuDeviceGetCount(self, count):  # noqa: N802
            count._obj.value = 1
            return 0

        def cuDeviceGetName(self, name, length, device):  # noqa: N802
            name.value = b"NVIDIA H200"

        def cuDeviceGetUuid(self, identity, device):  # noqa: N802
            identity.raw = bytes(range(16))

        def cuDeviceTotalMem_v2(self, memory, device):  # noqa: N802
            memory._obj.value = 1 << 37

        def cuDeviceGetAttribute(self, number, attribute, device):  # noqa: N802
            number._obj.value = {75: 9, 76: 0}[attribute]

    monkeypatch.setattr(local_devices, "cuda_driver", Driver)
    monkeypatch.setattr(local_devices.metadata, "version", lambda name: "2.13.0+cu130")

    (name, gpu), (last, _) = local_devices.local_devices()

    assert (name, last) == ("cuda:0", "cpu")
    assert (gpu.sku, gpu.compute_capability, gpu.memory_bytes) == ("NVIDIA H200", "9.0", 1 << 37)
    assert gpu.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
