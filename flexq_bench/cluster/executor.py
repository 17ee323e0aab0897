"""An executor whose devices are Ray actors; stored results stay in the driver's hands."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from flexq_bench.cluster.actor import ROOT, MeterActor
from flexq_bench.cluster.backlog import Backlog, Job, Shape
from flexq_bench.cluster.runtime import LOCAL, MAX_CPU_SLOTS, cpu_slots, ray_session
from flexq_bench.errors import InfrastructureError, MeasureError
from flexq_bench.execution import Outcome, Worker, failed
from flexq_bench.measure import Tuning
from flexq_bench.provenance import source_hash
from kernels.contract import Backend, Capability
from workloads.case import Case

MAX_ATTEMPTS = 3
_START_TIMEOUT_S = 180.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Slot:
    """A place for an actor: its device, and the shape it measured last.

    is_broken: the actor died or its device stopped working; a fresh one must take its place.
    """

    handle: Any
    worker: Worker
    last: Shape | None = None
    is_broken: bool = False


class RayExecutor:
    """Hands out cases one at a time to every actor of a cluster.

    address: "local" or a Ray address. backend None: GPUs if the cluster has any, else CPUs.
    An actor that dies takes no result with it: its case is measured again by a fresh actor, and
    after three deaths it is recorded as failed.
    Opening it raises InfrastructureError if Ray or an actor doesn't start.
    """

    def __init__(
        self,
        address: str,
        *,
        backend: Backend | None,
        seed: int,
        tuning: Tuning = Tuning.REMEMBERED,
    ) -> None:
        self._address = address
        self._asked = backend
        self._backend: Backend = backend or "cpu"
        self._seed, self._tuning = seed, tuning
        self._slots: list[_Slot] = []
        self._open = ExitStack()

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def capability(self) -> Capability | None:
        return self._slots[0].worker.capability

    @property
    def gpu(self) -> str:
        return self._slots[0].worker.device.sku

    def __enter__(self) -> Self:
        gpus = 0 if self._asked == "cpu" else None
        with ExitStack() as opening:
            opening.enter_context(ray_session(self._address, gpus=gpus))
            import ray

            resources = ray.cluster_resources()
            found = int(resources.get("GPU", 0))
            if self._asked == "cuda" and not found:
                raise InfrastructureError(
                    f"the cluster ({self._address}) has no GPU: use --backend cpu, or add a node"
                )
            self._backend = self._asked or ("cuda" if found else "cpu")
            count = found if self._backend == "cuda" else self._cpu_count(resources)
            handles = [self._create() for _ in range(count)]
            self._slots = [_Slot(handle, self._greet(handle)) for handle in handles]
            self._open = opening.pop_all()
        log.info("%d actors on %s", len(self._slots), self._slots[0].worker.device.sku)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._slots.clear()
        self._open.close()

    def check(self, cases: Sequence[Case]) -> None:
        import ray

        problem = ray.get(self._ready(self._slots[0]).handle.check.remote(tuple(cases)))
        if problem:
            raise MeasureError(problem)

    def execute(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        import ray

        backlog = Backlog(cases)
        running: dict[Any, tuple[_Slot, Job]] = {}
        while backlog or running:
            self._hand_out(backlog, running)
            done, _ = ray.wait(list(running), num_returns=1)
            slot, job = running.pop(done[0])
            try:
                measured = ray.get(done[0])
            except (ray.exceptions.RayError, InfrastructureError) as error:
                detail = _first_line(error)
                log.warning("%s, attempt %d: %s", job.case.key, job.attempt, detail)
                if job.attempt < MAX_ATTEMPTS:
                    backlog.put_back(job.again())
                else:
                    yield self._give_up(slot, job, detail)
                slot.is_broken = True
            else:
                yield Outcome(job.case, measured, slot.worker, job.attempt)

    def _hand_out(self, backlog: Backlog, running: dict[Any, tuple[_Slot, Job]]) -> None:
        for slot in self._slots:
            if any(slot is other for other, _ in running.values()):
                continue
            job = backlog.take(slot.last, busy=[job.shape for _, job in running.values()])
            if job is None:
                return
            handle = self._ready(slot).handle
            slot.last = job.shape
            running[handle.measure.remote(job.case)] = (slot, job)

    def _give_up(self, slot: _Slot, job: Job, reason: str) -> Outcome:
        detail = f"its worker died {job.attempt} times, at last: {reason}"
        measured = failed(job.case, detail, backend=self._backend, seed=self._seed)
        return Outcome(job.case, measured, slot.worker, job.attempt)

    def _ready(self, slot: _Slot) -> _Slot:
        """The slot with a working actor: a fresh one, if the one it had is broken."""
        import ray

        if slot.is_broken:
            ray.kill(slot.handle)
            slot.handle = self._create()
            slot.worker = self._greet(slot.handle)
            slot.last = None
            slot.is_broken = False
        return slot

    def _create(self) -> Any:
        import ray

        need = {"num_gpus": 1, "num_cpus": 0} if self._backend == "cuda" else {"num_cpus": 1}
        return (
            ray.remote(MeterActor).options(**need).remote(self._backend, self._seed, self._tuning)
        )

    def _greet(self, handle: Any) -> Worker:
        """Wait for an actor and make sure that it would run our kernels."""
        import ray

        try:
            worker: Worker = ray.get(handle.describe.remote(), timeout=_START_TIMEOUT_S)
            sources = ray.get(handle.sources.remote(), timeout=_START_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            raise InfrastructureError(
                f"no worker after {_START_TIMEOUT_S:.0f} s: somebody else holds the cluster's "
                "devices (see `ray status`)"
            ) from None
        except ray.exceptions.RayError as error:
            raise InfrastructureError(f"a worker did not start: {_first_line(error)}") from error
        if sources != source_hash(ROOT):
            host = worker.environment.get("host", "a node")
            raise InfrastructureError(
                f"{host} has other kernel sources than this machine: install this commit there"
            )
        return worker

    def _cpu_count(self, resources: dict[str, float]) -> int:
        if self._address == LOCAL:
            return cpu_slots()
        return max(1, min(int(resources.get("CPU", 1)), MAX_CPU_SLOTS))


def _first_line(error: BaseException) -> str:
    """The reason in one line: a remote exception's last line, a death's first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "Traceback" in str(error) else lines[0]
