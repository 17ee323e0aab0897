"""A fleet: a crew and its coordinator, from plans to runs that are gone through."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from db import queries
from db.engine import Database
from db.fleet import JobInfo, add_jobs, forget_silent_workers, reopen_jobs
from db.records import CommitInfo, RunInfo
from db.store import begin_run, finish_run
from flexq_bench.errors import CancelledError, InfrastructureError
from flexq_bench.fleet.coordinator import Coordinator, Work
from flexq_bench.fleet.device_offsets import store_offsets
from flexq_bench.fleet.ray_comparer import ComparerActor
from flexq_bench.fleet.ray_pool import RayCrew
from flexq_bench.fleet.request_worker import Station
from flexq_bench.fleet.timeouts import Times
from flexq_bench.measure.ab import CaseComparison
from flexq_bench.runs.cost_estimate import read_costs
from flexq_bench.runs.lifecycle import OnRecord
from flexq_bench.runs.machine import Machine
from kernels.contract import Backend, Capability
from workloads.case import Case

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of GPU (or the CPU) that the fleet has, and how many of it."""

    gpu: str  # SKU
    backend: Backend
    capability: Capability | None  # None: a CPU
    workers: int


class Fleet:
    """Use `open_fleet`. One set of works at a time."""

    def __init__(self, database: Database, crew: RayCrew, commit: CommitInfo, times: Times) -> None:
        self._database, self._crew, self._commit = database, crew, commit
        self._on_record: OnRecord = lambda record: None
        self._coordinator = Coordinator(
            database, crew, commit, times, on_record=lambda record: self._on_record(record)
        )

    def gather(self) -> None:
        """Wait for the workers. Raises InfrastructureError if none comes."""
        self._coordinator.gather()
        if not self._coordinator.members:
            reasons = "; ".join(self._crew.refusals) or "it has no devices"
            raise InfrastructureError(f"no worker started on this cluster: {reasons}")

    def refresh(self) -> None:
        """Take in the workers that came, and let those go that are lost."""
        self._coordinator.gather()

    def dismiss(self) -> None:
        self._coordinator.dismiss()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What the fleet has now, by name."""
        members = self._coordinator.members
        count = Counter(member.gpu for member in members)
        worker_of = {member.gpu: member.worker for member in members}
        return tuple(
            Kind(gpu, self._crew.backend, worker_of[gpu].capability, count[gpu])
            for gpu in sorted(count)
        )

    def declare(
        self, run: RunInfo, gpu: str, cases: Sequence[Case], *, repetitions: int = 1
    ) -> Work:
        """Store a run with its jobs, or go on with it; cases: those without a result.

        A case that does not fit this kind of GPU becomes a job without a device, with the reason.
        """
        unfit = self._coordinator.unfit(gpu, cases)
        for key, reason in unfit.items():
            log.warning("no-device: %s: %s", key, reason)
        with self._database.session() as session:
            run = begin_run(session, run, self._commit)
            costs = read_costs(session, gpu)
            jobs = [
                JobInfo(case.key, number, costs.seconds(case), unfit.get(case.key, ""))
                for case in cases
                for number in range(1, repetitions + 1)
            ]
            add_jobs(session, run.uuid, jobs)
            reopen_jobs(session, run.uuid, unfit)
        return Work(run, gpu, {case.key: case for case in cases})

    def measure(self, works: Sequence[Work], on_record: OnRecord) -> None:
        """Go through the works, and say of each run how it ended.

        A run some of whose cases had no device is interrupted: it goes on where there is one.
        Raises what Coordinator.carry_out raises.
        """
        self._on_record = on_record
        try:
            self._coordinator.carry_out(works)
        except (KeyboardInterrupt, CancelledError):
            self._finish(works, "interrupted")
            raise
        except Exception:
            self._finish(works, "failed")
            raise
        self._finish(works, "complete")

    def machine(self, gpu: str) -> Machine:
        """A device of this kind, as verdicts name it."""
        member = next(one for one in self._coordinator.members if one.gpu == gpu)
        return Machine(self._crew.backend, member.worker.device)

    def compare(
        self, gpu: str, repository: Path, base: str, head: str, cases: Sequence[Case], seed: int
    ) -> list[CaseComparison]:
        """Two commits taking turns on a GPU of this kind, whose node has the repository.

        Raises what compare_commits raises, InfrastructureError if no such GPU is free.
        """
        self._coordinator.gather()
        found: list[CaseComparison] = self._crew.lend(
            gpu, ComparerActor, "compare", repository, base, head, tuple(cases), seed
        )
        self._coordinator.gather()
        return found

    def station(self, kind: Kind) -> Station:
        """The workers of one kind, as who serves requests wants them."""

        def measure(run: RunInfo, cases: Sequence[Case], on_record: OnRecord) -> None:
            self.measure([self.declare(run, kind.gpu, cases)], on_record)

        return Station(kind, measure)

    def _finish(self, works: Sequence[Work], status: str) -> None:
        with self._database.session() as session:
            for work in works:
                unmeasured = queries.jobs_of(session, work.run.uuid, states=("no-device",))
                ended = "interrupted" if status == "complete" and unmeasured else status
                finish_run(session, work.run.uuid, ended)
                store_offsets(session, work.run.uuid)


@contextmanager
def open_fleet(
    database: Database, crew: RayCrew, commit: CommitInfo, times: Times
) -> Iterator[Fleet]:
    """A fleet whose workers are ready. Raises InfrastructureError if none starts."""
    silent_since = datetime.now(UTC) - timedelta(seconds=2 * times.lease)
    with database.session() as session:
        forget_silent_workers(session, silent_since=silent_since)
    with crew:
        fleet = Fleet(database, crew, commit, times)
        fleet.gather()
        try:
            yield fleet
        finally:
            fleet.dismiss()
