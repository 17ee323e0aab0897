"""Workers of a Ray cluster: actors that measure cases or compare commits, one per slot."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flexq_bench.db.fleet import COMPARE
from flexq_bench.db.tuning import ChoiceInfo
from flexq_bench.errors import InfrastructureError, MeasureError
from flexq_bench.fleet.compare_jobs import Compared, CompareJob
from flexq_bench.fleet.ray_actors import Actor, RayActors
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import ReadyWorker, Report
from flexq_bench.kernels import registry
from flexq_bench.kernels.autotune import TuningKey
from flexq_bench.kernels.contract import Backend
from flexq_bench.kernels.errors import SourceError
from flexq_bench.kernels.external.loading import load
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure import Meter, Tuning
from flexq_bench.measure.ab import InterleaveRules, compare_commits
from flexq_bench.measure.device import capability, describe_environment, device_info, find_device
from flexq_bench.measure.device_lock import device_alone
from flexq_bench.measure.external_kernels import adopt, log_failures
from flexq_bench.measure.nvml import open_handle
from flexq_bench.measure.process_limits import limit_memory
from flexq_bench.repository.provenance import ROOT, source_hash
from flexq_bench.runs.worker import Worker, measure_case, worker_of
from flexq_bench.workloads.case import Case

_RELEASE_TIMEOUT_S = 15.0  # for the previous process on the device to end


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The description of a worker that is ready. sources: hash of the code that it runs."""

    worker: Worker
    sources: str
    software: str = ""


class MeterActor:
    """Measures one case at a time on the device that Ray assigned to this process.

    On a CPU it uses one thread, so that actors of one host don't share cores.
    kernels_from: sources of external kernels. Raises InfrastructureError if another process
    uses its GPU, or if those kernels can't be loaded on this machine.
    """

    def __init__(
        self,
        backend: Backend,
        seed: int,
        tuning: Tuning,
        kernels_from: Sequence[KernelSource] = (),
    ) -> None:
        if kernels_from:
            limit_memory(backend)
        for source in kernels_from:
            try:
                registry.add(load(source).kernels)
            except SourceError as error:
                raise InfrastructureError(str(error)) from error
        if backend == "cpu":
            torch.set_num_threads(1)
        self._meter = Meter(_device_of(backend), seed=seed, tuning=tuning)
        self._known_keys: set[TuningKey] = set()
        # Held until the process ends. Actors on the slots of one CPU run side by side.
        self._device_lock = device_alone(
            self._meter.device_info.uuid, shared=backend == "cpu", wait_s=_RELEASE_TIMEOUT_S
        )
        self._device_lock.__enter__()
        _wait_for_exclusive_use(self._meter)

    def describe(self) -> WorkerDescription:
        machine = self._meter.tuning_machine
        return WorkerDescription(worker_of(self._meter), source_hash(ROOT), machine.software)

    def memory_obstacles(self, cases: Sequence[Case]) -> dict[str, str]:
        """Reasons, by key, why cases don't fit the free memory."""
        reasons = {}
        for case in cases:
            try:
                self._meter.check_memory(case)
            except MeasureError as error:
                reasons[case.key] = str(error)
        return reasons

    def measure(self, case: Case, choices: Sequence[ChoiceInfo]) -> Report:
        """Measure a case. choices: configurations that other workers chose.

        Raises InfrastructureError if the device is broken: the process must be replaced.
        """
        memory = self._meter.choices
        for choice in choices:
            key = TuningKey(**choice.key)
            memory.offer(key, choice.config)
            self._known_keys.add(key)
        measured = measure_case(self._meter, case)
        new = {key: config for key, config in memory.chosen.items() if key not in self._known_keys}
        self._known_keys |= new.keys()
        return Report(
            measured,
            tuple(ChoiceInfo(asdict(key), config.as_dict()) for key, config in new.items()),
        )


class ComparerActor:
    """Starts the worker processes of both commits, which see the same GPU as this process."""

    def __init__(
        self,
        backend: Backend,
        seed: int,
        tuning: Tuning,
        kernels_from: Sequence[KernelSource] = (),
    ) -> None:
        adopt(kernels_from)
        log_failures()
        self._device, self._seed = _device_of(backend), seed

    def describe(self) -> WorkerDescription:
        device = find_device(self._device)
        environment = describe_environment(device, open_handle(device))
        worker = Worker(device_info(self._device), environment, capability(device), os.getpid())
        return WorkerDescription(worker, source_hash(ROOT))

    def beat(self) -> None:
        """Answer, also during a comparison, whose processes this one only waits for."""

    def compare(self, job: CompareJob, repository: Path, rules: InterleaveRules | None) -> Compared:
        """Compare on the device. An error that a comparison can have is the answer, not raised."""
        compare = partial(
            compare_commits,
            repository,
            job.base,
            job.head,
            job.cases,
            device=self._device,
            seed=self._seed,
            rules=rules or InterleaveRules(),
        )
        return Compared.by(compare)


class RayWorkers(RayActors):
    """The implementation of `Workers` on Ray.

    actor, comparer: the classes of the actors that measure and that compare, called with backend,
    seed, tuning and the sources of external kernels. Other arguments and errors: see RayActors.
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
        comparer: type = ComparerActor,
        kernels_from: tuple[KernelSource, ...] = (),
    ) -> None:
        self._of_workers = (seed, tuning, *((kernels_from,) if kernels_from else ()))
        super().__init__(address, actor, *self._of_workers, backend=backend, times=times or Times())
        self._meter, self._comparer = actor, comparer
        self._sources = source_hash(ROOT)

    def use(self, kind: str) -> None:
        comparing = kind == COMPARE
        # A comparison needs its device alone, and the slots of a CPU share it.
        self.replace_class(
            self._comparer if comparing else self._meter,
            *self._of_workers,
            one_per_host=comparing and self.backend == "cpu",
        )

    def introduced(self, actor: Actor, answer: Any) -> ReadyWorker:
        """Refuse a worker that runs other code than this process."""
        description: WorkerDescription = answer
        if description.sources != self._sources:
            host = description.worker.environment.get("host", actor.slot.host)
            raise InfrastructureError(
                f"{host} has other code of flexq-bench than this machine: install this commit there"
            )
        return ReadyWorker(actor.uuid, description.worker, description.software)

    def start(self, worker: str, case: Case, choices: Sequence[ChoiceInfo]) -> None:
        self.call(worker, "measure", case, tuple(choices))

    def compare(
        self, worker: str, job: CompareJob, repository: Path, rules: InterleaveRules | None = None
    ) -> None:
        self.call(worker, "compare", job, repository, rules)

    def memory_obstacles(self, worker: str, cases: Sequence[Case]) -> Mapping[str, str]:
        reasons: dict[str, str] = self.call_and_wait(worker, "memory_obstacles", tuple(cases))
        return reasons


def _device_of(backend: Backend) -> str:
    """The device of an actor: Ray shows a process only its own GPU, which is always the first."""
    return "cpu" if backend == "cpu" else "cuda:0"


def _wait_for_exclusive_use(meter: Meter) -> None:
    """Raise InfrastructureError if other processes use the device for longer than the timeout."""
    give_up = time.monotonic() + _RELEASE_TIMEOUT_S
    while processes := meter.other_processes():
        if time.monotonic() > give_up:
            raise InfrastructureError(
                f"{processes} other processes compute on {meter.device_info.sku} "
                f"{meter.device_info.uuid}: end them (nvidia-smi shows them), a worker needs the "
                "GPU alone"
            )
        time.sleep(0.5)
