"""The GPU that configurations are chosen for: torch's current one, or an assumed one.

The choice depends on the architecture, the number of SMs, the shared memory that a block may
request, and the bandwidth of the memory. Assuming these (`chosen_for`) gives the choice for a GPU
that this machine does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.runtime.occupancy import LIMITS


class Device(NamedTuple):
    """Properties of a GPU that times depend on. memory_gbps: peak bandwidth in GB/s."""

    sms: int
    memory_gbps: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a GPU on which the choice of a configuration depends.

    arch: as NVRTC names it, for example "sm_90". sms: number of streaming multiprocessors.
    block_shared_bytes: shared memory that one block may request (99 KB on an RTX 3090 Ti).
    memory_gbps: peak bandwidth of the memory in GB/s.
    """

    arch: str
    sms: int
    block_shared_bytes: int
    memory_gbps: int

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, for example (9, 0)."""
        return divmod(int(self.arch.removeprefix("sm_")), 10)


def _gpu(arch: str, sms: int, memory_gbps: int) -> Gpu:
    return Gpu(arch, sms, LIMITS[arch].block_shared_bytes, memory_gbps)


# A GPU of each target: A100, RTX 3090 Ti (and A6000), RTX 4090, H200, B200, RTX PRO 6000. The
# numbers of SMs are from NVIDIA's architecture white papers; for the last two, from the driver.
# Bandwidths are from NVIDIA's data sheets; for the H200, from the driver's clock and bus width.
OF_TARGET = {
    gpu.arch: gpu
    for gpu in (
        _gpu("sm_80", 108, 2039),
        _gpu("sm_86", 84, 1008),
        _gpu("sm_89", 128, 1008),
        _gpu("sm_90", 132, 4917),
        _gpu("sm_100", 148, 8000),
        _gpu("sm_120", 188, 1792),
    )
}

_UNKNOWN_GBPS = 1000

_ASSUMED: ContextVar[Gpu | None] = ContextVar("assumed_gpu", default=None)


@contextmanager
def chosen_for(gpu: Gpu) -> Iterator[None]:
    """Choose configurations for `gpu` within the block, whether or not this machine has one."""
    token = _ASSUMED.set(gpu)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def current_gpu() -> Gpu:
    """Return the assumed GPU, else torch's current one. Raises torch's error without a GPU."""
    return _ASSUMED.get() or present_gpu(torch.cuda.current_device())


def current_device() -> Device:
    """Return the properties of current_gpu() that times depend on."""
    gpu = current_gpu()
    return Device(gpu.sms, gpu.memory_gbps)


@cache
def present_gpu(device: int) -> Gpu:
    """Return this machine's GPU `device`. Raises KernelError if the driver call fails."""
    from cuda.bindings import driver

    def attribute(name: str) -> int:
        identifier = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        status, value = driver.cuDeviceGetAttribute(identifier, device)
        if int(status) != 0:
            raise KernelError(f"cuDeviceGetAttribute failed with {status}")
        return int(value)

    major, minor = torch.cuda.get_device_capability(device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    block_shared_bytes = attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    # kHz, two transfers per cycle, and bits. The driver reports 0 where it does not know them.
    rate, width = attribute("MEMORY_CLOCK_RATE"), attribute("GLOBAL_MEMORY_BUS_WIDTH")
    memory_gbps = round(2 * rate * width / 8e6) or _UNKNOWN_GBPS
    return Gpu(f"sm_{major}{minor}", sms, block_shared_bytes, memory_gbps)
