"""The GPU that configurations are chosen for: torch's current one, or an assumed one.

The choice depends on the architecture, the number of SMs and the shared memory that a block may
request. Assuming these (`chosen_for`) gives the choice for a GPU that this machine does not have.
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
    """Properties of a GPU on which the choice of a configuration depends.

    arch: as NVRTC names it, for example "sm_90". sms: number of streaming multiprocessors.
    block_shared_bytes: shared memory that one block may request (99 KB on an RTX 3090 Ti).
    """

    arch: str
    sms: int
    block_shared_bytes: int

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, for example (9, 0)."""
        return divmod(int(self.arch.removeprefix("sm_")), 10)


def _gpu(arch: str, sms: int) -> Gpu:
    return Gpu(arch, sms, LIMITS[arch].block_shared_bytes)


# A GPU of each target: A100, RTX 3090 Ti (and A6000), RTX 4090, H200, B200, RTX PRO 6000. The
# numbers of SMs are from NVIDIA's architecture white papers; for the last two, from the driver.
OF_TARGET = {
    gpu.arch: gpu
    for gpu in (
        _gpu("sm_80", 108),
        _gpu("sm_86", 84),
        _gpu("sm_89", 128),
        _gpu("sm_90", 132),
        _gpu("sm_100", 148),
        _gpu("sm_120", 188),
    )
}

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


@cache
def present_gpu(device: int) -> Gpu:
    """Return this machine's GPU `device`. Raises KernelError if the driver call fails."""
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    status, block_shared_bytes = driver.cuDeviceGetAttribute(attribute, device)
    if int(status) != 0:
        raise KernelError(f"cuDeviceGetAttribute failed with {status}")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Gpu(f"sm_{major}{minor}", sms, block_shared_bytes)
