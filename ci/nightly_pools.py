"""Where a night is measured: this process on its device, or a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ci.nightly import Planned
from flexq_bench.fleet import Fleet
from flexq_bench.measure.ab import CaseComparison, compare_commits
from flexq_bench.measure.local_devices import device_info
from flexq_bench.runs.executor import DeviceKind, LocalExecutor
from flexq_bench.runs.lifecycle import OnRecord, store_outcomes
from flexq_bench.verdicts import Machine
from workloads.case import Case


class LocalSite:
    """One kind of device: this process's."""

    def __init__(self, executor: LocalExecutor, device: str) -> None:
        self._executor, self._device = executor, device

    @property
    def kinds(self) -> Sequence[DeviceKind]:
        return (self._executor,)

    def measure(self, planned: Sequence[Planned], on_record: OnRecord) -> None:
        # A case that doesn't fit the memory becomes a failed one: it must not cost the night.
        for one in planned:
            outcomes = self._executor.execute(one.cases)
            store_outcomes(one.run, one.cases, outcomes, on_record=on_record)

    def machine(self, gpu: str) -> Machine:
        return Machine(self._executor.backend, device_info(self._device))

    def compare(
        self, gpu: str, repository: Path, base: str, head: str, cases: Sequence[Case]
    ) -> list[CaseComparison]:
        return list(compare_commits(repository, base, head, cases, device=self._device))


class FleetSite:
    """Every kind of GPU that a fleet has, or those asked for."""

    def __init__(
        self, fleet: Fleet, kinds: Sequence[DeviceKind], *, repeat: int, seed: int
    ) -> None:
        self._fleet, self._kinds = fleet, tuple(kinds)
        self._repeat, self._seed = repeat, seed

    @property
    def kinds(self) -> Sequence[DeviceKind]:
        return self._kinds

    def measure(self, planned: Sequence[Planned], on_record: OnRecord) -> None:
        works = [
            self._fleet.declare(one.run, one.gpu, one.cases, repetitions=self._repeat)
            for one in planned
        ]
        self._fleet.measure(works, on_record)

    def machine(self, gpu: str) -> Machine:
        return self._fleet.machine(gpu)

    def compare(
        self, gpu: str, repository: Path, base: str, head: str, cases: Sequence[Case]
    ) -> list[CaseComparison]:
        return self._fleet.compare(gpu, repository, base, head, cases, self._seed)
