"""The GPU that configurations are chosen for: torch's current one, or one that is only described.

Which configuration runs depends on a GPU's architecture, its SMs and what a block of it may hold.
Describing these lets a machine without a GPU tell what would run on one (`chosen_for`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch

from kernels.errors import KernelError
from kernels.runtime.occupancy import LIMITS


@dataclass(frozen=True, slots=True)
class Gpu:
    """arch: NVRTC's name of it, for example "sm_90". sms: streaming multiprocessors.

    block_shared_bytes: shared memory that one block may ask for (99 KB on an RTX 3090 Ti).
    """

    arch: str
    sms: int
    block_shared_bytes: int

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, for example (9, 0)."""
        return divmod(int(self.arch.removeprefix("sm_")), 10)


def _described(arch: str, sms: int) -> Gpu:
    return Gpu(arch, sms, LIMITS[arch].block_shared_bytes)


# A GPU of each target: A100, RTX 3090 Ti (and A6000), RTX 4090, H200, B200, RTX PRO 6000. SMs are
# those of NVIDIA's architecture white papers; of the last two, what their drivers report.
OF_TARGET = {
    gpu.arch: gpu
    for gpu in (
        _described("sm_80", 108),
        _described("sm_86", 84),
        _described("sm_89", 128),
        _described("sm_90", 132),
        _described("sm_100", 148),
        _described("sm_120", 188),
    )
}

_DESCRIBED: ContextVar[Gpu | None] = ContextVar("described_gpu", default=None)


@contextmanager
def chosen_for(gpu: Gpu) -> Iterator[None]:
    """Configurations are chosen for `gpu` within it, whether or not this machine has one."""
    token = _DESCRIBED.set(gpu)
    try:
        yield
    finally:
        _DESCRIBED.reset(token)


def current_gpu() -> Gpu:
    """The GPU to choose for. Raises what torch raises if none is described and none is there."""
    return _DESCRIBED.get() or present_gpu(torch.cuda.current_device())


@cache
def present_gpu(device: int) -> Gpu:
    """This machine's GPU `device`. Raises KernelError if the driver won't tell."""
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    status, block_shared_bytes = driver.cuDeviceGetAttribute(attribute, device)
    if int(status) != 0:
        raise KernelError(f"cuDeviceGetAttribute failed with {status}")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Gpu(f"sm_{major}{minor}", sms, block_shared_bytes)
