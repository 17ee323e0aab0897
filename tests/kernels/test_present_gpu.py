"""What the driver reports of a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.runtime.gpu import Gpu, present_gpu

driver = pytest.importorskip("cuda.bindings.driver")


def reported(monkeypatch, *, khz, bits, status=0):
    """The GPU of a driver that reports this clock and width of the memory's bus."""
    values = {
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 * 1024,
        "MEMORY_CLOCK_RATE": khz,
        "GLOBAL_MEMORY_BUS_WIDTH": bits,
    }
    by_attribute = {
        getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"): value
        for name, value in values.items()
    }
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        driver, "cuDeviceGetAttribute", lambda which, device: (status, by_attribute[which])
    )
    return present_gpu.__wrapped__(0)


@pytest.mark.parametrize(
    ("khz", "bits", "gbps"),
    [(2619000, 5120, 3352), (3201000, 6144, 4917), (10501000, 384, 1008)],
    ids=["H100", "H200", "RTX 3090 Ti"],
)
def test_bandwidth_is_that_of_two_transfers_per_clock(monkeypatch, khz, bits, gbps):
    assert reported(monkeypatch, khz=khz, bits=bits) == Gpu("sm_90", 132, 227 * 1024, gbps)


def test_unknown_memory_clock_has_default_bandwidth(monkeypatch):
    assert reported(monkeypatch, khz=0, bits=0).memory_gbps > 0


def test_a_failing_driver_call_is_an_error(monkeypatch):
    with pytest.raises(KernelError, match="cuDeviceGetAttribute failed with 999"):
        reported(monkeypatch, khz=1, bits=1, status=999)
