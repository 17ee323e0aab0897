"""The devices of this machine, described without torch, whose import takes two seconds."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from flexq_bench.db.records import DeviceInfo
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.runtime.driver import cuda_driver

_CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_CPUINFO = Path("/proc/cpuinfo")
# of CUdevice_attribute
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76


def local_devices() -> list[tuple[str, DeviceInfo]]:
    """Names for `--device` with a description of each: GPUs first, then the CPU.

    A GPU has its identity, memory and compute capability; for the rest see device.device_info.
    """
    return [*((f"cuda:{i}", gpu) for i, gpu in enumerate(_gpus())), ("cpu", describe_cpu())]


def describe_cpu() -> DeviceInfo:
    match = re.search(r"model name\s*:\s*(.+)", file_text(_CPUINFO))
    model = match[1].strip() if match else platform.processor() or platform.machine()
    identity = hashlib.sha256(f"{platform.node()}\0{model}".encode()).hexdigest()
    return DeviceInfo(
        uuid=f"CPU-{identity[:32]}",
        sku=model,
        backend="cpu",
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        l2_bytes=_cpu_l2_bytes(),
        sm_count=os.cpu_count(),
    )


def file_text(path: Path) -> str:
    """The text of a file of the system; empty: there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _gpus() -> Iterator[DeviceInfo]:
    """The GPUs that torch can use, in CUDA's order; none with its builds for CPUs."""
    if metadata.version("torch").endswith("+cpu"):
        return
    try:
        driver = cuda_driver()
    except UnsupportedError:
        return
    identify = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return
    for device in range(count.value):  # a CUdevice is its ordinal
        name, identity = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
        memory, major, minor = ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetName(name, len(name), device)
        identify(identity, device)
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        for number, attribute in (
            (major, _COMPUTE_CAPABILITY_MAJOR),
            (minor, _COMPUTE_CAPABILITY_MINOR),
        ):
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        yield DeviceInfo(
            uuid=f"GPU-{uuid.UUID(bytes=identity.raw)}",
            sku=name.value.decode(),
            backend="cuda",
            memory_bytes=memory.value,
            compute_capability=f"{major.value}.{minor.value}",
        )


def _cpu_l2_bytes() -> int | None:
    """The L2 of the first core. A shared L3 is excluded, because a guest may see its host's."""
    for index in sorted(_CPU_CACHE.glob("index*")):
        if file_text(index / "level").strip() == "2":
            match = re.fullmatch(r"(\d+)([KM]?)", file_text(index / "size").strip())
            if match:
                return int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]]
    return None
