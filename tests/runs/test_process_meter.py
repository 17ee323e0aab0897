"""Worker processes that measure external kernels."""

from __future__ import annotations

import pytest

from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import KernelSpec
from flexq_bench.kernels.external.described import DescribedKernel
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.measure import Tuning, kernel_processes
from flexq_bench.measure.external_kernels import Adopted
from flexq_bench.measure.kernel_processes import ProcessOptions
from flexq_bench.measure.worker_process import RefusedError, WorkerError
from flexq_bench.runs.process_meter import ProcessMeter
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload


class MadeProcess:
    """In place of a process; what each was told to load is kept, and how its cases end."""

    started: list[tuple[str, ...]]
    error: Exception = WorkerError("acme: ValueError: one", "ValueError: one")

    def __init__(self, name, tree, command, **options):
        self.started.append(tuple(command[command.index("--tuning") + 2 :]))

    def ask(self, what, **arguments):
        if what == "prepare":
            raise self.error
        return {}

    def allow(self, seconds, **how):
        pass

    def close(self):
        pass


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(MadeProcess, "started", [], raising=False)
    monkeypatch.setattr(kernel_processes, "WorkerProcess", MadeProcess)
    yield MadeProcess.started
    registry.remove(registry.external_labels())


@pytest.fixture
def measured(started):
    """Results of kernels of two files, and the options of their processes."""
    names = ("one", "two")
    registry.add([a_kernel(f"acme.{name}") for name in names])
    sources = {KernelSource(f"/{name}.py", "acme"): (f"acme.{name}",) for name in names}
    options = ProcessOptions("cpu", 0, Tuning.NONE, 1.0, 1.0)

    def run(*kernels):
        with ProcessMeter(options, Adopted(sources, {})) as meter:
            return [meter.measure(Case(f"acme.{k}", GemmWorkload(1, 32, 32))) for k in kernels]

    return run


def a_kernel(name):
    int8 = NumberFormat(8)
    return DescribedKernel(KernelSpec(name, "cpu", int8, int8, "made", source_hash="0"))


def test_each_kernel_file_has_its_own_process(measured, started):
    measured("one", "two")

    first, second = started
    assert first == ("--kernels-from", "acme=/one.py")
    assert second == ("--kernels-from", "acme=/two.py")


def test_a_process_that_failed_is_replaced(measured, started):
    results = measured("one", "one")

    assert [(r.status, r.detail) for r in results] == [("failed", "ValueError: one")] * 2
    assert len(started) == 2


def test_what_a_kernel_does_not_support_leaves_its_process(measured, started, monkeypatch):
    refused = RefusedError("acme: no m=1", "no m=1", is_unsupported=True)
    monkeypatch.setattr(MadeProcess, "error", refused)

    results = measured("one", "one")

    assert [(r.status, r.detail) for r in results] == [("unsupported", "no m=1")] * 2
    assert len(started) == 1
