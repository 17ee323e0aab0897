"""Workers of a Ray cluster: actors that measure cases, one per GPU or CPU slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexq_bench.db.tuning import ChoiceInfo
from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet.ray_actors import Actor, RayActors
from flexq_bench.fleet.ray_worker import MeterActor, WorkerDescription
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import ReadyWorker
from flexq_bench.kernels.contract import Backend
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure import Tuning
from flexq_bench.repository.provenance import ROOT, source_hash
from flexq_bench.workloads.case import Case


class RayWorkers(RayActors):
    """The implementation of `Workers` on Ray.

    actor: the class of the actors, called with backend, seed, tuning and the sources of kernels
    from outside. Other arguments and errors: see RayActors.
    """

    greeting = "describe"

    def __init__(
        self,
        address: str,
        *,
        backend: Backend | None,
        seed: int,
        tuning: Tuning = Tuning.REMEMBERED,
        times: Times | None = None,
        actor: type = MeterActor,
        kernels_from: tuple[KernelSource, ...] = (),
    ) -> None:
        arguments = (seed, tuning, *((kernels_from,) if kernels_from else ()))
        super().__init__(address, actor, *arguments, backend=backend, times=times or Times())
        self._sources = source_hash(ROOT)

    def introduced(self, actor: Actor, answer: Any) -> ReadyWorker:
        """Refuse a worker that runs other code than this process."""
        description: WorkerDescription = answer
        if description.sources != self._sources:
            host = description.worker.environment.get("host", actor.slot.host)
            raise InfrastructureError(
                f"{host} has other code of flexq-bench than this machine: install this commit there"
            )
        actor.gpu = description.worker.device.sku
        return ReadyWorker(actor.uuid, description.worker, description.software)

    def start(self, worker: str, case: Case, choices: Sequence[ChoiceInfo]) -> None:
        self.call(worker, "measure", case, tuple(choices))

    def memory_obstacles(self, worker: str, cases: Sequence[Case]) -> Mapping[str, str]:
        reasons: dict[str, str] = self.call_and_wait(worker, "memory_obstacles", tuple(cases))
        return reasons
