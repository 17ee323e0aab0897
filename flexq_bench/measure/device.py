"""Description of the device, of its environment, and of other processes on it."""

from __future__ import annotations

import difflib
import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch

from flexq_bench.db.records import DeviceInfo
from flexq_bench.errors import DeviceError
from flexq_bench.kernels.contract import Capability
from flexq_bench.kernels.runtime.nvrtc import COMMON_OPTIONS
from flexq_bench.measure.local_devices import describe_cpu, file_text
from flexq_bench.measure.nvml import Nvml, open_handle

_MEMINFO = Path("/proc/meminfo")
# Packages that determine the machine code; the CUDA 12 and 13 variants of one are the same.
_CUDA_PACKAGES = {
    "cupy": ("cupy-cuda13x", "cupy-cuda12x"),
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "cublas": ("nvidia-cublas", "nvidia-cublas-cu12"),
    "nvmath": ("nvmath-python",),
}


def find_device(name: str) -> torch.device:
    """The torch device of a name: "cpu", "cuda" (the first) or "cuda:1".

    Raises DeviceError if this machine has no such device; the message lists the nearest names
    first.
    """
    present = _device_names()
    full_name = "cuda:0" if name == "cuda" else name
    if full_name in present:
        return torch.device(full_name)
    near = difflib.get_close_matches(full_name, present, n=len(present), cutoff=0.4)
    ordered = near + [other for other in present if other not in near]
    raise DeviceError(f"no device {name!r}: this machine has {', '.join(ordered)}")


def devices_from(name: str, count: int) -> tuple[str, ...]:
    """Names of so many devices, from this one on; a CPU is all of them."""
    if name == "cpu":
        return (name,) * count
    kind, _, index = name.partition(":")
    return tuple(f"{kind}:{int(index or 0) + i}" for i in range(count))


def device_infos(name: str, count: int) -> list[DeviceInfo]:
    """Describe those of `devices_from` that this machine has."""
    present = _device_names()
    return [device_info(device) for device in devices_from(name, count) if device in present]


def device_info(name: str) -> DeviceInfo:
    """Describe a device. Raises DeviceError if this machine has none of that name."""
    device = find_device(name)
    return describe_device(device, None if device.type == "cpu" else open_handle(device))


def describe_device(device: torch.device, nvml: Nvml | None) -> DeviceInfo:
    """The device's identity and size. Values from NVML are null if it is not available."""
    if device.type == "cpu":
        return describe_cpu()
    properties = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid)
    return DeviceInfo(
        uuid=uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}",
        sku=properties.name,
        backend="cuda",
        vbios=nvml.vbios() if nvml else None,
        power_limit_w=nvml.power_limit_w() if nvml else None,
        ecc=nvml.ecc() if nvml else None,
        mig=nvml.mig() if nvml else None,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        sm_count=properties.multi_processor_count,
        compute_capability=f"{properties.major}.{properties.minor}",
    )


def _device_names() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [*(f"cuda:{i}" for i in range(count)), "cpu"]


def capability(device: torch.device) -> Capability | None:
    """CUDA compute capability; None on a CPU."""
    return None if device.type == "cpu" else torch.cuda.get_device_capability(device)


def describe_environment(device: torch.device, nvml: Nvml | None) -> dict[str, str]:
    """Describe everything besides device and commit that affects times and is constant in a run."""
    environment = {
        "host": platform.node(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if device.type == "cpu":
        environment["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        return environment
    environment["cuda"] = str(torch.version.cuda)
    environment["driver"] = (nvml.driver_version() if nvml else None) or "unknown"
    environment["clock_policy"] = _clock_policy(nvml)
    environment["compiler_flags"] = " ".join(COMMON_OPTIONS)
    for name, distributions in _CUDA_PACKAGES.items():
        version = _first_version(distributions)
        if version is not None:
            environment[name] = version
    return environment


def other_processes(nvml: Nvml | None, own: int = 1) -> int | None:
    """Number of other processes that compute on the device; None: the driver doesn't report them.

    So many of the listed processes are assumed to be this one and its own: in a container the
    driver's process ids differ from ours and can't be compared.
    """
    pids = nvml.compute_pids() if nvml else None
    return None if pids is None else max(0, len(set(pids)) - own)


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    match = re.search(r"MemAvailable:\s+(\d+) kB", file_text(_MEMINFO))
    if match:
        return int(match[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _clock_policy(nvml: Nvml | None) -> str:
    """Return the clock policy: default, or clocks that somebody set (we never set any)."""
    if nvml is None:
        return "unknown"
    applications, default = nvml.applications_sm_clock_mhz(), nvml.default_sm_clock_mhz()
    if applications is None or applications == default:
        return "default"
    return f"applications at {applications:.0f} MHz, default {default:.0f} MHz"


def _first_version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None
