"""The interface between the coordinator and worker processes: jobs to start, events to handle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flexq_bench.db.tuning import ChoiceInfo
from flexq_bench.fleet.compare_jobs import CompareJob
from flexq_bench.measure import Measured
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.runs.worker import Worker
from flexq_bench.workloads.case import Case


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker process that is ready. software: versions that its tuning choices are valid for.

    further_devices: uuids of the devices besides `device`, of a worker for cases of several GPUs.
    """

    uuid: str  # of the process
    worker: Worker
    software: str = ""
    further_devices: tuple[str, ...] = ()

    @property
    def gpu(self) -> str:
        """SKU of its device."""
        return self.worker.device.sku

    @property
    def device(self) -> str:
        """uuid of its device."""
        return self.worker.device.uuid

    @property
    def places(self) -> tuple[str, ...]:
        """Its host and its devices: if one of them is drained, it gets no work."""
        return (self.worker.environment.get("host", ""), self.device, *self.further_devices)


@dataclass(frozen=True, slots=True)
class Report:
    """A case's result, and the configurations that tuning chose for it."""

    measured: Measured
    choices: tuple[ChoiceInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is ready. worker: a ReadyWorker, or the description by another class of actors."""

    worker: Any


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker finished a call. answer: a Report, a Compared, or another class's result."""

    worker: str  # uuid
    answer: Any


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker process ended. blameless: not because of its job (its node or device failed).

    reason empty: it was idle, and was replaced by a process for jobs of another kind.
    """

    worker: str  # uuid
    reason: str
    blameless: bool = False


Event = Joined | Finished | Lost


class Workers(Protocol):
    """Workers, each on its own devices. Lost workers are replaced.

    All carry out jobs of one kind, at first those that measure on one GPU.
    """

    def use(self, kind: str, gpus: int = 1) -> None:
        """Replace the workers by processes for jobs of this kind (`measure`, `compare`).

        gpus: of each, all of one host. A Lost without a reason follows for each that is replaced.
        """
        ...

    def poll(self, timeout_s: float) -> Sequence[Event]:
        """Return the events since the last call; wait at most timeout_s for the first one."""
        ...

    def start(self, worker: str, case: Case, choices: Sequence[ChoiceInfo]) -> None:
        """Start a case on an idle worker; a Finished or a Lost follows.

        choices: configurations chosen by other workers and not sent to this one yet.
        """
        ...

    def compare(
        self, worker: str, job: CompareJob, repository: Path, rules: InterleaveRules | None = None
    ) -> None:
        """Start a comparison on an idle worker; a Finished or a Lost follows.

        rules None: the default.
        """
        ...

    def end(self, worker: str, reason: str) -> None:
        """Kill a worker's process, idle or not; a Lost follows."""
        ...

    def give_back(self, worker: str) -> None:
        """End an idle worker; its device is free for others. A Lost without a reason follows."""
        ...

    def take_back(self, workers: Collection[str]) -> None:
        """Start workers on the devices that these gave back."""
        ...

    def memory_obstacles(self, worker: str, cases: Sequence[Case]) -> Mapping[str, str]:
        """Reasons, by key, why cases don't fit the memory of a worker's device; it must be idle.

        Raises InfrastructureError if it doesn't answer; a Lost follows then.
        """
        ...

    @property
    def arriving(self) -> int:
        """Workers that are being started."""
        ...

    @property
    def blocked(self) -> int:
        """Those of them that wait for devices in use by others."""
        ...
