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
from db.errors import DatabaseError
from db.fleet import JobInfo, add_jobs, forget_silent_workers, reopen_jobs
from db.records import CommitInfo
from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet.coordinator import Coordinator, Work
from flexq_bench.fleet.device_offsets import store_offsets
from flexq_bench.fleet.ray_comparer import ComparerActor
from flexq_bench.fleet.ray_pool import RayCrew
from flexq_bench.fleet.request_worker import Station
from flexq_bench.fleet.timeouts import Times
from flexq_bench.measure.ab import CaseComparison
from flexq_bench.runs.cost_estimate import read_costs
from flexq_bench.runs.lifecycle import OnRecord, OpenRun
from flexq_bench.verdicts import Machine
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
        self, run: OpenRun, gpu: str, cases: Sequence[Case], *, repetitions: int = 1
    ) -> Work:
        """Store the jobs that a run lacks; cases: those without a result.

        A case that does not fit this kind of GPU becomes a job without a device, with the reason.
        """
        unfit = self._coordinator.unfit(gpu, cases)
        for key, reason in unfit.items():
            log.warning("no-device: %s: %s", key, reason)
        with self._database.session() as session:
            costs = read_costs(session, gpu)
            jobs = [
                JobInfo(case.key, number, costs.seconds(case), unfit.get(case.key, ""))
                for case in cases
                for number in range(1, repetitions + 1)
            ]
            add_jobs(session, run.info.uuid, jobs)
            reopen_jobs(session, run.info.uuid, unfit)
        return Work(run, gpu, {case.key: case for case in cases})

    def measure(self, works: Sequence[Work], on_record: OnRecord) -> None:
        """Measure the jobs of the works.

        A run some of whose cases had no device ends interrupted: it goes on where there is one.
        Raises what Coordinator.carry_out raises.
        """
        self._on_record = on_record
        try:
            self._coordinator.carry_out(works)
            self._interrupt_unmeasured(works)
        finally:
            self._store_offsets(works)

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

        def measure(run: OpenRun, cases: Sequence[Case], on_record: OnRecord) -> None:
            self.measure([self.declare(run, kind.gpu, cases)], on_record)

        return Station(kind, measure)

    def _interrupt_unmeasured(self, works: Sequence[Work]) -> None:
        with self._database.session() as session:
            for work in works:
                if queries.jobs_of(session, work.run.info.uuid, states=("no-device",)):
                    work.run.status = "interrupted"

    def _store_offsets(self, works: Sequence[Work]) -> None:
        try:
            with self._database.session() as session:
                for work in works:
                    store_offsets(session, work.run.info.uuid)
        except DatabaseError as error:  # what ended the work matters more
            log.warning("the offsets of single GPUs were not stored: %s", error)


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
