"""A process that measures on one device: its description, and the result of one case there."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

from db.queries.costs import WALL_S
from db.records import DeviceInfo
from flexq_bench.errors import MeasureError
from flexq_bench.measure import PROTOCOL_CPU, PROTOCOL_CUDA, Measured, Meter
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
    """The result of a case. attempt: 1, or more where a worker died on the case before."""

    case: Case
    measured: Measured
    worker: Worker
    attempt: int = 1


def worker_of(meter: Meter) -> Worker:
    """This process as a worker."""
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
    """A result without a time, in the series that its time would have been in."""
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
        regime=case.regime,
        kernel_version=spec.version if spec else 0,
        weight_bits=spec.weight.bits if spec else 0,
        act_bits=spec.activation.bits if spec else 0,
        group=spec.weight.group if spec else None,
        source_hash=spec.source_hash if spec else None,
    )
