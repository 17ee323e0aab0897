"""The interface between the coordinator and worker processes: cases to start, events to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from db.tuning import ChoiceInfo
from flexq_bench.measure import Measured
from flexq_bench.runs.worker import Worker
from workloads.case import Case


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker process that is ready. uuid: of the process; software: what its choices hold for."""

    uuid: str
    worker: Worker
    software: str = ""

    @property
    def gpu(self) -> str:
        """SKU of its device."""
        return self.worker.device.sku

    @property
    def device(self) -> str:
        """uuid of its device."""
        return self.worker.device.uuid


@dataclass(frozen=True, slots=True)
class Report:
    """A case's result, and the configurations that were chosen on the way."""

    measured: Measured
    choices: tuple[ChoiceInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is ready. worker: a ReadyWorker, or what else its kind of actor introduces."""

    worker: Any


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker answered. answer: a Report, or what else its kind of actor returns."""

    worker: str  # uuid
    answer: Any


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is no more. blameless: what it held did not end it (its node or device did)."""

    worker: str  # uuid
    reason: str
    blameless: bool = False


Event = Joined | Finished | Lost


class Workers(Protocol):
    """Workers, each on a device of its own. Those that are lost are replaced."""

    def poll(self, timeout_s: float) -> Sequence[Event]:
        """Return the events since the last call; wait at most timeout_s for the first one."""
        ...

    def start(self, worker: str, case: Case, choices: Sequence[ChoiceInfo]) -> None:
        """Have an idle worker measure a case; a Finished or a Lost follows.

        choices: others' configurations that it has not been told of.
        """
        ...

    def end(self, worker: str, reason: str) -> None:
        """Kill a worker's process, whatever it does; a Lost follows."""
        ...

    def memory_obstacles(self, worker: str, cases: Sequence[Case]) -> Mapping[str, str]:
        """By key, why cases can't be measured on this worker's device; it must be idle.

        Raises InfrastructureError if it doesn't answer; a Lost follows then.
        """
        ...

    @property
    def arriving(self) -> int:
        """Workers that are being started."""
        ...
