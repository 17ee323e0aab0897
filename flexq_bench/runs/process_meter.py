"""Measurers of one device: a meter in this process, or worker processes for outside kernels."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, Self

from flexq_bench.db.records import DeviceInfo
from flexq_bench.errors import MeasureError
from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import Backend
from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure import Measured, Meter, Tuning
from flexq_bench.measure.external_kernels import Adopted, options_of, sandbox_of
from flexq_bench.measure.launcher import FreshProcesses, forking_launcher
from flexq_bench.measure.program import program_root
from flexq_bench.measure.sandbox import Kind
from flexq_bench.measure.worker_process import RefusedError, WorkerError, WorkerProcess
from flexq_bench.runs.meter_worker import MODULE
from flexq_bench.runs.worker import Worker, failed, measure_case, worker_of
from flexq_bench.workloads.case import Case

SANDBOX = "sandbox"  # in `extra` of a result: the kind of sandbox that an external kernel ran in

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Options of worker processes. environment None: that of this process. start_s: timeout of a
    start; case_s: timeout of a case, after which the process is killed."""

    device: str
    seed: int
    tuning: Tuning
    start_s: float
    case_s: float
    environment: Mapping[str, str] | None = None


class ProcessMeter:
    """Measures in worker processes, each with the kernels of one source; a context manager.

    Built-in kernels run in a process that loads no files from outside; installed packages are
    trusted and imported in all processes. A process that dies, hangs or fails is replaced, and its
    case gets a failed result. Kernels from outside run in a sandbox where this machine allows one;
    `extra` of their results has its kind.

    Raises WorkerError if the first process can't describe the device.
    """

    def __init__(self, options: ProcessOptions, kernels: Adopted) -> None:
        self._options = options
        self._source_of = {
            label: source for source, labels in kernels.labels.items() for label in labels
        }
        self._process: WorkerProcess | None = None
        self._group = ""
        self._sandbox: Kind = "none"
        with ExitStack() as stack:
            self._launcher = stack.enter_context(forking_launcher(program_root()))
            described = self._process_for(None).ask("describe")
            self._launchers = stack.pop_all()
        device = {**described["device"]}
        self.backend: Backend = "cpu" if described["backend"] == "cpu" else "cuda"
        capability = described["capability"]
        self.worker = Worker(
            DeviceInfo(**device),
            described["environment"],
            None if capability is None else (capability[0], capability[1]),
            described["pid"],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None and self._process is not None:
            self._process.kill()
        self._end()
        self._launchers.close()

    def check(self, case: Case) -> None:
        if not self._group_of(case):
            reason = self._process_for(None).ask("memory_obstacles", case=case.key)["reason"]
            if reason:
                raise MeasureError(reason)

    def in_order(self, cases: Sequence[Case]) -> Sequence[Case]:
        groups = dict.fromkeys(map(self._group_of, cases))
        position = {group: at for at, group in enumerate(sorted(groups, key=lambda g: g != ""))}
        return sorted(cases, key=lambda case: position[self._group_of(case)])

    def measure(self, case: Case) -> Measured:
        group = self._group_of(case)
        try:
            values = self._process_for(case).ask("measure", case=case.key)
            if group:
                values["extra"] = {**values.get("extra", {}), SANDBOX: self._sandbox}
            measured = measured_of(values)
        except (RefusedError, WorkerError) as error:
            self._end()
            return failed(case, str(error), backend=self.backend, seed=self._options.seed)
        if measured.status in ("failed", "incorrect") and group:
            self._end()  # its state must not affect the next case
        return measured

    def _process_for(self, case: Case | None) -> WorkerProcess:
        """The process that measures a case; None: the one with built-in kernels only."""
        group = "" if case is None else self._group_of(case)
        if self._process is None or self._group != group:
            self._end()
            source = None if case is None else self._source_of.get(case.label)
            name = "the meter's process" if not group or case is None else _package_of(case)
            self._process = self._start(name, () if source is None else (source,))
            self._group = group
        return self._process

    def _start(self, name: str, sources: Sequence[KernelSource]) -> WorkerProcess:
        options = self._options
        sandbox = sandbox_of(sources, options.environment)
        self._sandbox = sandbox.kind
        process = WorkerProcess(
            name,
            program_root(),
            (
                *(sys.executable, "-m", MODULE, "--device", options.device),
                *("--seed", str(options.seed), "--tuning", options.tuning.value),
                *options_of(sources),
            ),
            timeout_s=options.start_s,
            environment=options.environment,
            launcher=self._launcher if sandbox.kind == "none" else FreshProcesses(sandbox.wrap),
        )
        try:
            process.ask("describe")
        except BaseException:
            process.kill()
            process.close()
            raise
        process.allow(options.case_s)
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _group_of(self, case: Case) -> str:
        """The key of cases that share a process: a source of kernels from outside, or an installed
        package; empty: built-in kernels."""
        try:
            spec = registry.resolve(case.label, self.backend).spec
        except KernelError:
            return ""
        if not spec.is_external:
            return ""
        source = self._source_of.get(case.label)
        return _package_of(case) if source is None else source.argument


def _package_of(case: Case) -> str:
    return case.kernel.partition(".")[0]


def measured_of(values: Mapping[str, Any]) -> Measured:
    """Convert a worker's plain values to a Measured. Raises WorkerError if they are none."""
    try:
        lists = {
            "placement_medians_us": tuple(values["placement_medians_us"]),
            "samples_us": tuple(map(tuple, values["samples_us"])),
        }
        return Measured(**{**values, **lists})
    except (KeyError, TypeError) as error:
        raise WorkerError(f"a worker's reply is no result: {error}") from None
