"""A pool: the devices that measure, which are this process's own or those of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flexq_bench.db.records import Record, RunInfo
from flexq_bench.fleet.compare_jobs import ComparisonWork
from flexq_bench.kernels.contract import Backend, Capability
from flexq_bench.runs.lifecycle import OnRecord, OpenRun
from flexq_bench.runs.machine import Machine
from flexq_bench.workloads.case import Case

OnCompared = Callable[[int], None]  # called with the id of a job


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of device in a pool, and the numbers of its workers and devices."""

    gpu: str  # SKU; the model name of a CPU
    backend: Backend
    capability: Capability | None  # None: a CPU
    workers: int = 1
    devices: int = 1  # a CPU has several workers


@dataclass(frozen=True, slots=True)
class Work:
    """Cases of an open run that have no result yet, for one kind of device."""

    run: OpenRun
    gpu: str  # SKU
    cases: Sequence[Case]


class Pool(Protocol):
    """Devices that measure. `open_pool` chooses between the implementations."""

    @property
    def kinds(self) -> Sequence[Kind]:
        """The kinds of device that are available now, limited to those requested."""
        ...

    def refresh(self) -> None:
        """Add devices that joined, and remove those that are lost."""
        ...

    def check(self, cases: Sequence[Case]) -> None:
        """Raise MeasureError if a case does not fit the memory of this process's device.

        A cluster raises nothing: such a case becomes a job without a device.
        """
        ...

    def measure(self, works: Sequence[Work], on_record: OnRecord) -> None:
        """Measure the works; store each result when it arrives, then call on_record with it.

        A failed case also gives a result. A run with cases that could not be measured gets its
        final status. Raises InfrastructureError, and any exception of on_record.
        """
        ...

    def machine(self, gpu: str) -> Machine:
        """One device of this kind, in the form that verdicts use."""
        ...

    def refusal(self, gpu: str) -> str:
        """Return why workers, perhaps of this kind of device, did not start; empty: none failed."""
        ...

    @property
    def refused_gpus(self) -> Mapping[str, str]:
        """Reasons why no worker started on any GPU of a kind, by a part of the kind's name."""
        ...

    def compare(self, works: Sequence[ComparisonWork], on_compared: OnCompared) -> None:
        """Carry out the stored comparisons of runs that have no outcome yet.

        Each outcome is stored when it arrives; then on_compared is called. A comparison of a kind
        without a device becomes a job without a device. Raises InfrastructureError, and any
        exception of on_compared.
        """
        ...

    def kind_to_resume(self, run: RunInfo, first: Record | None) -> Kind:
        """The kind of device for a run's missing cases. first: one of its results; None: none.

        Raises UsageError if the pool has no device that fits the results of the run.
        """
        ...
