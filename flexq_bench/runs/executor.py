"""Measuring the cases of a plan in this process (on a cluster: flexq_bench.fleet)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from db.queries.costs import WALL_S
from db.records import DeviceInfo
from flexq_bench.errors import MeasureError
from flexq_bench.measure import PROTOCOL_CPU, PROTOCOL_CUDA, Measured, Meter, Tuning
from kernels import registry
from kernels.contract import Backend, Capability
from kernels.errors import KernelError
from workloads.case import Case


@dataclass(frozen=True, slots=True)
class Worker:
    """A device that measures, and the environment around it. pid: of the process on its host."""

    device: DeviceInfo
    environment: dict[str, str]
    capability: Capability | None
    pid: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came back for a case. attempt: 1, or more where a worker died on the case before."""

    case: Case
    measured: Measured
    worker: Worker
    attempt: int = 1


class DeviceKind(Protocol):
    """What all devices of one kind have in common."""

    @property
    def backend(self) -> Backend: ...

    @property
    def capability(self) -> Capability | None:
        """Compute capability of its GPUs; None on CPUs."""
        ...

    @property
    def gpu(self) -> str:
        """Their SKU."""
        ...


class Executor(DeviceKind, Protocol):
    """Measures cases on one kind of device."""

    def check(self, cases: Sequence[Case]) -> None:
        """Raise MeasureError if a case would not fit in memory, before anything is allocated."""
        ...

    def execute(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """One outcome a case, as they come. A case that fails is an outcome, not an exception.

        Raises InfrastructureError if the device can't go on.
        """
        ...


class LocalExecutor:
    """Measures in this process on one device. Raises DeviceError if there is no such device."""

    def __init__(self, device: str, *, seed: int, tuning: Tuning = Tuning.REMEMBERED) -> None:
        self._meter = Meter(device, seed=seed, tuning=tuning)
        self._worker = worker_of(self._meter)

    @property
    def worker(self) -> Worker:
        """This process, as others see it."""
        return self._worker

    @property
    def backend(self) -> Backend:
        return self._meter.backend

    @property
    def capability(self) -> Capability | None:
        return self._worker.capability

    @property
    def gpu(self) -> str:
        return self._worker.device.sku

    def check(self, cases: Sequence[Case]) -> None:
        for case in cases:
            self._meter.check_memory(case)

    def execute(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        for case in cases:
            yield Outcome(case, measure_case(self._meter, case), self._worker)


def worker_of(meter: Meter) -> Worker:
    return Worker(meter.device_info, meter.environment, meter.capability, os.getpid())


def measure_case(meter: Meter, case: Case) -> Measured:
    """Measure a case; one that no longer fits the memory is a failed case, not the run's end.

    The seconds that all of it took stand in `extra`: estimates are made of them.
    """
    begun = time.perf_counter()
    try:
        measured = meter.measure(case)
    except MeasureError as error:
        measured = failed(case, str(error), backend=meter.backend, seed=meter.seed)
    wall_s = round(time.perf_counter() - begun, 3)
    return replace(measured, extra={**measured.extra, WALL_S: wall_s})


def failed(case: Case, detail: str, *, backend: Backend, seed: int) -> Measured:
    """A case without a time, in the series that its time would have been in."""
    protocol = PROTOCOL_CPU if backend == "cpu" else PROTOCOL_CUDA
    try:
        spec = registry.resolve(case.label, backend).spec
    except KernelError:
        spec = None
    return Measured(
        status="failed",
        detail=detail,
        seed=seed,
        protocol_version=protocol.version,
        input_distribution="",
        kernel_version=spec.version if spec else 0,
        weight_bits=spec.weight.bits if spec else 0,
        act_bits=spec.activation.bits if spec else 0,
        group=spec.weight.group if spec else None,
    )
