"""Measurers of one device: of kernels in this process, and of external ones in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, Self

from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import Backend
from flexq_bench.kernels.errors import KernelError
from flexq_bench.measure import Measured, Meter
from flexq_bench.measure.external_kernels import Adopted
from flexq_bench.measure.kernel_processes import KernelProcesses, ProcessOptions
from flexq_bench.measure.protocol import Protocol as MeasuringProtocol
from flexq_bench.repository.project_builds import BENCHMARKS_VARIABLE
from flexq_bench.runs.worker import Worker, measure_case, worker_of
from flexq_bench.workloads.case import Case

# In `extra`: the revision or path of a kernel's file that is not the commit's own.
BENCHMARKS_FROM = "benchmarks_from"
SANDBOX = "sandbox"  # in `extra` of a result: the kind of sandbox that an external kernel ran in


class Measurer(Protocol):
    """The interface of a measurer of one device."""

    @property
    def worker(self) -> Worker: ...

    @property
    def backend(self) -> Backend: ...

    def check(self, case: Case) -> None:
        """Raise MeasureError if the case doesn't fit the free memory."""
        ...

    def in_order(self, cases: Sequence[Case]) -> Sequence[Case]:
        """Sort cases into the order of measurement."""
        ...

    def measure(self, case: Case) -> Measured:
        """Measure a case; a kernel that fails or crashes gives a failed result."""
        ...


class InProcessMeter:
    """A measurer that measures in this process."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.worker, self.backend = worker_of(meter), meter.backend

    def check(self, case: Case) -> None:
        self._meter.check_memory(case)

    def in_order(self, cases: Sequence[Case]) -> Sequence[Case]:
        return cases

    def measure(self, case: Case) -> Measured:
        return measure_case(self._meter, case)


class ProcessMeter:
    """A measurer that judges external kernels, which run in worker processes; a context manager.

    All others are measured in this process, first. `extra` of a result of an external kernel has
    the kind of its sandbox, and the origin of its file.
    """

    def __init__(
        self, options: ProcessOptions, kernels: Adopted, protocol: MeasuringProtocol | None = None
    ) -> None:
        origin = (kernels.environment or {}).get(BENCHMARKS_VARIABLE)
        self._origin = {} if origin is None else {BENCHMARKS_FROM: origin}
        with ExitStack() as stack:
            self._processes = stack.enter_context(KernelProcesses(options, kernels))
            self.meter = Meter(
                options.device,
                protocol,
                seed=options.seed,
                tuning=options.tuning,
                external=self._processes,
            )
            self._resources = stack.pop_all()
        self.worker, self.backend = worker_of(self.meter), self.meter.backend

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: Any) -> None:
        self._resources.__exit__(*details)

    def check(self, case: Case) -> None:
        self.meter.check_memory(case)

    def in_order(self, cases: Sequence[Case]) -> Sequence[Case]:
        groups = dict.fromkeys(map(self._group_of, cases))
        position = {group: at for at, group in enumerate(sorted(groups, key=lambda g: g != ""))}
        return sorted(cases, key=lambda case: position[self._group_of(case)])

    def measure(self, case: Case) -> Measured:
        if not self._group_of(case):
            self._processes.end()
            return measure_case(self.meter, case)
        measured = measure_case(self.meter, case)
        if measured.status in ("failed", "incorrect"):
            self._processes.end()  # its state must not affect the next case
        extra = {**measured.extra, SANDBOX: self._processes.sandbox, **self._origin}
        return replace(measured, extra=extra)

    def _group_of(self, case: Case) -> str:
        """The key of external kernels that share a process; empty: one of this program."""
        try:
            spec = registry.resolve(case.label, self.backend).spec
        except KernelError:
            return ""
        return self._processes.group_of(case) if spec.is_external else ""
