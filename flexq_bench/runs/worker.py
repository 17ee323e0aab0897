"""Description of a process that measures on one device, and measurement of one case."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from time import perf_counter  # by name: external kernels may replace it in `time`

from flexq_bench.db.queries.results import WALL_S
from flexq_bench.db.records import DeviceInfo
from flexq_bench.errors import MeasureError
from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import Backend, Capability
from flexq_bench.kernels.errors import KernelError
from flexq_bench.measure import PROTOCOL_CPU, PROTOCOL_CUDA, Measured, Meter
from flexq_bench.workloads.case import Case


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that measures: its device, environment and PID on its host."""

    device: DeviceInfo
    environment: dict[str, str]
    capability: Capability | None
    pid: int


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """The result of a case. attempt: from 1; increased by one if a worker dies or is lost."""

    case: Case
    measured: Measured
    worker: Worker
    attempt: int = 1


def worker_of(meter: Meter) -> Worker:
    """Describe this process as a worker."""
    return Worker(meter.device_info, meter.environment, meter.capability, os.getpid())


def measure_case(meter: Meter, case: Case) -> Measured:
    """Measure a case; if it doesn't fit the memory, return a failed result.

    The elapsed seconds are stored in `extra`, for estimates of measuring time.
    """
    started = perf_counter()
    try:
        measured = meter.measure(case)
    except MeasureError as error:
        measured = failed(case, str(error), backend=meter.backend, seed=meter.seed)
        measured = replace(measured, protocol_version=meter.protocol.version)
    wall_s = round(perf_counter() - started, 3)
    return replace(measured, extra={**measured.extra, WALL_S: wall_s})


def failed(case: Case, detail: str, *, backend: Backend, seed: int) -> Measured:
    """A failed result, with the values that identify the case's series."""
    protocol = PROTOCOL_CPU if backend == "cpu" else PROTOCOL_CUDA
    result = Measured("failed", detail, seed, protocol.version, "", regime=case.regime)
    try:
        return result.of_kernel(registry.resolve(case.label, backend).spec)
    except KernelError:
        return result
