"""The devices of this machine."""

from __future__ import annotations

import torch

from flexq_bench.db.records import DeviceInfo
from flexq_bench.measure.device import describe_device, find_device
from flexq_bench.measure.nvml import open_handle


def local_devices() -> list[tuple[str, DeviceInfo]]:
    """Names for `--device` with a description of each: GPUs first, then the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [*(f"cuda:{i}" for i in range(count)), "cpu"]
    return [(name, device_info(name)) for name in names]


def device_info(name: str) -> DeviceInfo:
    """Describe a device. Raises DeviceError if this machine has none of that name."""
    device = find_device(name)
    return describe_device(device, None if device.type == "cpu" else open_handle(device))
