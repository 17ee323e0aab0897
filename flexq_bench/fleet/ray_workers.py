"""Workers of a Ray cluster: actors that measure cases or compare commits, one per slot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from flexq_bench.db.leases import COMPARE
from flexq_bench.db.tuning import ChoiceInfo
from flexq_bench.errors import FlexqError, InfrastructureError, MeasureError
from flexq_bench.fleet.compare_jobs import Compared, CompareJob
from flexq_bench.fleet.ray_actors import Actor, RayActors
from flexq_bench.fleet.shared_builds import start_registry
from flexq_bench.fleet.shipped_kernels import ShippedKernels
from flexq_bench.fleet.shipped_repository import ShippedRepository, shipped
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import ReadyWorker, Report
from flexq_bench.kernels.autotune import TuningKey
from flexq_bench.kernels.contract import Backend
from flexq_bench.measure import Meter, Tuning
from flexq_bench.measure.ab import InterleaveRules, compare_kernels
from flexq_bench.measure.device import (
    capability,
    describe_environment,
    device_info,
    device_infos,
    find_device,
    other_processes,
)
from flexq_bench.measure.device_lock import devices_alone
from flexq_bench.measure.external_kernels import (
    KernelDescriptions,
    adopt_descriptions,
    descriptions_of,
)
from flexq_bench.measure.kernel_processes import ProcessOptions
from flexq_bench.measure.nvml import open_handle
from flexq_bench.repository.project import Project
from flexq_bench.repository.project_builds import BuildError
from flexq_bench.runs.process_meter import InProcessMeter, Measurer, ProcessMeter
from flexq_bench.runs.worker import Worker
from flexq_bench.verdicts import CaseComparison
from flexq_bench.workloads.case import Case

_RELEASE_TIMEOUT_S = 15.0  # for the previous process on the device to end


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The description of a worker that is ready. software, further_devices: as in ReadyWorker.

    kernels: external ones that it can run; None: it has none.
    """

    worker: Worker
    software: str = ""
    kernels: KernelDescriptions | None = None
    further_devices: tuple[str, ...] = ()


class MeterActor:
    """Measures one case at a time on the devices that Ray assigned to this process.

    On a CPU it uses one thread, so that actors of one host don't share cores. kernels: external
    ones, which run in processes of their own. Raises InfrastructureError if another process uses
    its GPU, ImportError if a commit with kernels does not build on this node.
    """

    def __init__(
        self, backend: Backend, seed: int, tuning: Tuning, kernels: ShippedKernels | None = None
    ) -> None:
        if backend == "cpu":
            torch.set_num_threads(1)
        device = _device_of(backend)
        self._meter: Meter | None = None
        self._adopted = None
        if kernels is None:
            self._meter = Meter(device, seed=seed, tuning=tuning)
            self._measurer: Measurer = InProcessMeter(self._meter)
        else:
            try:
                self._adopted = kernels.adopt()
            except BuildError as error:
                raise ImportError(str(error)) from error
            environment = self._adopted.environment
            limits = (kernels.start_s, kernels.case_s, environment)
            options = ProcessOptions(device, seed, tuning, *limits)
            self._measurer = ProcessMeter(options, self._adopted)
        self._known_keys: set[TuningKey] = set()
        # Held until the process ends. Actors on the slots of one CPU run side by side.
        self._devices = _uuids(device, backend)
        self._device_lock = devices_alone(
            self._devices,
            shared=backend == "cpu",
            wait_s=_RELEASE_TIMEOUT_S,
        )
        self._device_lock.__enter__()
        _wait_for_exclusive_use(device, self._measurer.worker)

    def describe(self) -> WorkerDescription:
        software = "" if self._meter is None else self._meter.tuning_machine.software
        kernels = None if self._adopted is None else descriptions_of(self._adopted)
        return WorkerDescription(self._measurer.worker, software, kernels, self._devices[1:])

    def memory_obstacles(self, cases: Sequence[Case]) -> dict[str, str]:
        """Reasons, by key, why cases don't fit the free memory."""
        reasons = {}
        for case in cases:
            try:
                self._measurer.check(case)
            except MeasureError as error:
                reasons[case.key] = str(error)
        return reasons

    def measure(self, case: Case, choices: Sequence[ChoiceInfo]) -> Report:
        """Measure a case. choices: configurations that other workers chose.

        Raises InfrastructureError if the device is broken: the process must be replaced.
        """
        if self._meter is None:  # processes of external kernels keep their own choices
            return Report(self._measurer.measure(case))
        memory = self._meter.choices
        for choice in choices:
            key = TuningKey(**choice.key)
            memory.offer(key, choice.config)
            self._known_keys.add(key)
        measured = self._measurer.measure(case)
        new = {key: config for key, config in memory.chosen.items() if key not in self._known_keys}
        self._known_keys |= new.keys()
        return Report(
            measured,
            tuple(ChoiceInfo(asdict(key), config.as_dict()) for key, config in new.items()),
        )


class ComparerActor:
    """Starts the worker processes of both commits, which see the same GPU as this process."""

    def __init__(
        self, backend: Backend, seed: int, tuning: Tuning, kernels: ShippedKernels | None = None
    ) -> None:
        is_project = kernels is not None and kernels.repository is not None
        self._project = kernels if is_project else None
        if kernels is not None and not is_project:
            kernels.adopt()
        self._device, self._backend, self._seed = _device_of(backend), backend, seed

    def describe(self) -> WorkerDescription:
        device = find_device(self._device)
        environment = describe_environment(device, open_handle(device))
        worker = Worker(device_info(self._device), environment, capability(device), os.getpid())
        return WorkerDescription(worker, further_devices=_uuids(self._device, self._backend)[1:])

    def beat(self) -> None:
        """Answer, also during a comparison, whose processes this one only waits for."""

    def compare(
        self, job: CompareJob, repository: ShippedRepository | None, rules: InterleaveRules | None
    ) -> Compared:
        """Compare on the device. An error that a comparison can have is the answer, not raised.

        repository None: two kernels are compared.
        """
        compare: Callable[..., Iterator[CaseComparison]] = (
            compare_kernels
            if repository is None
            else partial(repository.compare, judged=job.judged)
        )
        measure = partial(compare, device=self._device, seed=self._seed)

        def measured() -> Iterator[CaseComparison]:
            if job.judged and self._project is not None:  # the judge knows base's kernels
                self._project.adopt()
                self._project = None
            yield from measure(job.base, job.head, job.cases, rules=rules or InterleaveRules())

        return Compared.by(measured)


class RayWorkers(RayActors):
    """The implementation of `Workers` on Ray.

    actor, comparer: the classes of the actors that measure and that compare, called with backend,
    seed, tuning and external kernels, if there are any. kernels: puts these into the object store
    of the session. project: of the commits to compare; None: this program. Other arguments and
    errors: see RayActors.
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
        kernels: Callable[[], ShippedKernels | None] = lambda: None,
        project: Project | None = None,
    ) -> None:
        times = times or Times()
        if project is not None:
            times = replace(times, start=times.start + project.file.build.timeout_s)
        self._of_workers: tuple[object, ...] = (seed, tuning)
        super().__init__(address, actor, *self._of_workers, backend=backend, times=times)
        self._meter, self._comparer = actor, comparer
        self._kernels, self._project = kernels, project
        self._builds: Any = None  # the registry, which ends without a reference to it

    def __enter__(self) -> Self:
        super().__enter__()
        if self._project is not None:
            self._builds = start_registry()
        kernels = self._kernels()
        if kernels is not None:
            self._of_workers = self._arguments = (*self._arguments, kernels)
        return self

    def use(self, kind: str, gpus: int = 1) -> None:
        comparing = kind == COMPARE
        # A comparison needs its device alone, and the slots of a CPU share it.
        self.replace_class(
            self._comparer if comparing else self._meter,
            *self._of_workers,
            one_per_host=comparing and self.backend == "cpu",
            gpus=gpus,
        )

    def introduced(self, actor: Actor, answer: Any) -> ReadyWorker:
        description: WorkerDescription = answer
        if description.kernels is not None:
            adopt_descriptions(description.kernels)
        return ReadyWorker(
            *(actor.uuid, description.worker, description.software, description.further_devices)
        )

    def start(self, worker: str, case: Case, choices: Sequence[ChoiceInfo]) -> None:
        self.call(worker, "measure", case, tuple(choices))

    def compare(
        self, worker: str, job: CompareJob, repository: Path, rules: InterleaveRules | None = None
    ) -> None:
        try:
            ends = (job.base, job.head)
            sent = None if job.kernels else shipped(repository, ends, self._project)
        except FlexqError as error:  # the coordinator's clone lacks a commit
            self.answer(worker, Compared(error=error))
        else:
            self.call(worker, "compare", job, sent, rules)

    def memory_obstacles(self, worker: str, cases: Sequence[Case]) -> Mapping[str, str]:
        reasons: dict[str, str] = self.call_and_wait(worker, "memory_obstacles", tuple(cases))
        return reasons


def _device_of(backend: Backend) -> str:
    """The first device of an actor: Ray shows a process only its own GPUs."""
    return "cpu" if backend == "cpu" else "cuda:0"


def visible_count(backend: Backend) -> int:
    """Number of devices that Ray assigned to this process."""
    return 1 if backend == "cpu" else torch.cuda.device_count()


def _uuids(device: str, backend: Backend) -> tuple[str, ...]:
    """Uuids of all devices of this process."""
    return tuple(info.uuid for info in device_infos(device, visible_count(backend)))


def _wait_for_exclusive_use(device: str, worker: Worker) -> None:
    """Raise InfrastructureError if other processes use the device for longer than the timeout.

    worker: which has used it already.
    """
    nvml = open_handle(find_device(device))
    give_up = time.monotonic() + _RELEASE_TIMEOUT_S
    while processes := other_processes(nvml):
        if time.monotonic() > give_up:
            raise InfrastructureError(
                f"{processes} other processes compute on {worker.device.sku} "
                f"{worker.device.uuid}: end them (nvidia-smi shows them), a worker needs the "
                "GPU alone"
            )
        time.sleep(0.5)
