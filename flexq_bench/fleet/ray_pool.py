"""A pool of the workers of a Ray cluster, with a coordinator that leases jobs to them."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Self

from flexq_bench.db import queries
from flexq_bench.db.dialects import database_time
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.fleet import JobInfo, add_jobs, forget_silent_workers, reopen_jobs
from flexq_bench.db.leases import MEASURE
from flexq_bench.db.records import CommitInfo, Record, RunInfo
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.fleet.compare_jobs import ComparisonWork
from flexq_bench.fleet.coordinator import Coordinator
from flexq_bench.fleet.pool import Kind, OnCompared, Work
from flexq_bench.fleet.ray_workers import RayWorkers
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import ReadyWorker
from flexq_bench.results.device_offsets import store_offsets
from flexq_bench.runs.cost_estimate import read_costs
from flexq_bench.runs.lifecycle import OnRecord
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.transactions import run_transaction
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.names import unknown

log = logging.getLogger(__name__)


class RayPool:
    """A pool that measures one set of works at a time; `opened` gives it with ready workers.

    gpus: SKUs or globs of the kinds to use; empty: all. repeat: measurements per case.
    """

    def __init__(
        self,
        database: Database,
        workers: RayWorkers,
        commit: CommitInfo,
        times: Times,
        *,
        gpus: Sequence[str] = (),
        repeat: int = 1,
    ) -> None:
        self._database, self._workers, self._times = database, workers, times
        self._gpus, self.repeat = tuple(gpus), repeat
        self._on_record: OnRecord = lambda record: None
        self._coordinator = Coordinator(
            database, workers, commit, times, on_record=lambda record: self._on_record(record)
        )

    @contextmanager
    def opened(self) -> Iterator[Self]:
        """Start the workers, and mark them as stopped at the end. Raises as `gather`."""
        with self._database.session() as session:
            silent_since = database_time(session) - timedelta(seconds=2 * self._times.lease)
            forget_silent_workers(session, silent_since=silent_since)
        give_up = time.monotonic() + self._times.device
        with self._workers:
            try:
                self.gather(give_up)
                yield self
            finally:
                self._coordinator.mark_stopped()

    def gather(self, give_up: float = 0.0) -> None:
        """Wait for the workers; for nodes that have not joined yet, until `give_up`, monotonic.

        Raises InfrastructureError if none starts, UsageError if a requested kind has no worker.
        """
        self._coordinator.gather()
        is_logged = False
        while (missing := self._missing_kinds()) and time.monotonic() < give_up:
            if self._workers.refusals and not self._coordinator.workers:
                break  # nodes are there, and can't take part
            if not is_logged:
                what = ", ".join(missing)
                log.warning("waiting up to %.0f s for a node with %s", self._times.device, what)
                is_logged = True
            time.sleep(min(1.0, self._times.scan))
            self._coordinator.gather()
        if not self._coordinator.workers:
            reasons = "; ".join(self._workers.refusals) or "it has no devices"
            raise InfrastructureError(f"no worker started on this cluster: {reasons}")
        available = [kind.gpu for kind in self._all_kinds()]
        for pattern in missing:
            raise UsageError(unknown("GPU", pattern, available))

    def _missing_kinds(self) -> list[str]:
        """Requested kinds without a worker; any device, if there is no worker at all."""
        available = [kind.gpu for kind in self._all_kinds()]
        if not self._gpus:
            return [] if available else ["a device"]
        return [
            pattern
            for pattern in self._gpus
            if not any(fnmatchcase(gpu, pattern) for gpu in available)
        ]

    @property
    def kinds(self) -> Sequence[Kind]:
        return tuple(
            kind
            for kind in self._all_kinds()
            if not self._gpus or any(fnmatchcase(kind.gpu, pattern) for pattern in self._gpus)
        )

    def refresh(self) -> None:
        self._coordinator.gather()

    def check(self, cases: Sequence[Case]) -> None:
        """Do nothing: a case that fits no device becomes a job without a device."""

    def measure(self, works: Sequence[Work], on_record: OnRecord) -> None:
        self._on_record = on_record
        self._coordinator.use(MEASURE)
        try:
            for work in works:
                self._declare(work)
            self._coordinator.carry_out(works)
            self._interrupt_unmeasured(works)
        finally:
            self._store_offsets(works)

    def refusal(self, gpu: str) -> str:
        return "; ".join(self._workers.refusals_of(gpu))

    @property
    def refused_gpus(self) -> Mapping[str, str]:
        return {} if self._gpus else self._workers.refused_gpus  # requested ones are there: gather

    def machine(self, gpu: str) -> Machine:
        of_kind = (worker for worker in self._coordinator.workers if worker.gpu == gpu)
        ready = next(of_kind, None)
        if ready is None:
            raise InfrastructureError(f"no {gpu} is there: see `flexq-bench status`")
        return Machine(self._workers.backend, ready.worker.device)

    def compare(self, works: Sequence[ComparisonWork], on_compared: OnCompared) -> None:
        self._coordinator.compare(works, on_compared)

    def kind_to_resume(self, run: RunInfo, first: Record | None) -> Kind:
        kinds = {kind.gpu: kind for kind in self.kinds}
        if first is None and len(kinds) == 1:
            return next(iter(kinds.values()))
        if first is None:
            raise UsageError(
                f"run {run.uuid[:8]} has no result with its kind of GPU, and this cluster "
                f"has {', '.join(kinds)}: say which with --gpus"
            )
        if first.gpu not in kinds:
            raise UsageError(
                f"run {run.uuid[:8]} was begun on {first.gpu}, and this cluster has "
                f"{', '.join(kinds)}: join a cluster that has one"
            )
        return kinds[first.gpu]

    def _all_kinds(self) -> list[Kind]:
        by_gpu: dict[str, list[ReadyWorker]] = defaultdict(list)
        for ready in self._coordinator.workers:
            by_gpu[ready.gpu].append(ready)
        return [
            Kind(
                gpu,
                self._workers.backend,
                ready[0].worker.capability,
                len(ready),
                len({actor.device for actor in ready}),
            )
            for gpu, ready in sorted(by_gpu.items())
        ]

    def _declare(self, work: Work) -> None:
        """Store a run's jobs that are not stored yet.

        A case that does not fit this kind of GPU becomes a job without a device, with the reason.
        """
        memory_obstacles = self._coordinator.memory_obstacles(work.gpu, work.cases)
        for key, reason in memory_obstacles.items():
            log.warning("no-device: %s: %s", key, reason)
        run = work.run.info.uuid

        def declare(session: Session) -> None:
            costs = read_costs(session, work.gpu)
            jobs = [
                JobInfo(case.key, number, costs.seconds(case), memory_obstacles.get(case.key, ""))
                for case in work.cases
                for number in range(1, self.repeat + 1)
            ]
            add_jobs(session, run, jobs)
            reopen_jobs(session, run, memory_obstacles)

        run_transaction(self._database, declare)

    def _interrupt_unmeasured(self, works: Sequence[Work]) -> None:
        """Mark runs with cases that had no device as interrupted; they can be resumed elsewhere."""

        def interrupt(session: Session) -> None:
            for work in works:
                if queries.jobs_of(session, work.run.info.uuid, states=("no-device",)):
                    work.run.status = "interrupted"

        run_transaction(self._database, interrupt)

    def _store_offsets(self, works: Sequence[Work]) -> None:
        try:
            with self._database.session() as session:
                for work in works:
                    store_offsets(session, work.run.info.uuid)
        except DatabaseError as error:  # must not hide the exception that ended the run
            log.warning("the offsets of single GPUs were not stored: %s", error)
