"""Worker processes that measure external kernels."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from flexq_bench.db.records import DeviceInfo
from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import KernelSpec
from flexq_bench.kernels.external.described import DescribedKernel
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.measure import Tuning
from flexq_bench.measure.external_kernels import Adopted
from flexq_bench.runs import process_meter
from flexq_bench.runs.process_meter import ProcessMeter, ProcessOptions
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

DESCRIBED = {
    "device": asdict(DeviceInfo("CPU-1", "A CPU", "cpu")),
    "environment": {},
    "backend": "cpu",
    "capability": None,
    "pid": 1,
}


class MadeProcess:
    """In place of a process; what each was told to load is kept."""

    started: list[tuple[str, ...]]

    def __init__(self, name, tree, command, **options):
        self.started.append(tuple(command[command.index("--tuning") + 2 :]))

    def ask(self, what, **arguments):
        return {**DESCRIBED, "placement_medians_us": (), "samples_us": (), "status": "ok"}

    def allow(self, seconds):
        pass

    def close(self):
        pass


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(MadeProcess, "started", [], raising=False)
    monkeypatch.setattr(process_meter, "WorkerProcess", MadeProcess)
    monkeypatch.setattr(process_meter, "measured_of", lambda values: type("", (), values)())
    yield MadeProcess.started
    registry.remove(registry.external_labels())


def a_kernel(name):
    int8 = NumberFormat(8)
    return DescribedKernel(KernelSpec(name, "cpu", int8, int8, "made", source_hash="0"))


def test_each_kernel_file_has_its_own_process(started):
    registry.add([a_kernel("acme.one"), a_kernel("acme.two")])
    sources = {KernelSource(f"/{name}.py", "acme"): (f"acme.{name}",) for name in ("one", "two")}
    options = ProcessOptions("cpu", 0, Tuning.NONE, 1.0, 1.0)

    with ProcessMeter(options, Adopted(sources, {})) as meter:
        for name in ("one", "one", "two"):
            meter.measure(Case(f"acme.{name}", GemmWorkload(1, 32, 32)))

    ours, first, second = started
    assert ours == ()
    assert first == ("--kernels-from", "acme=/one.py")
    assert second == ("--kernels-from", "acme=/two.py")
