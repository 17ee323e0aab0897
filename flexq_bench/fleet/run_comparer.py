"""Comparisons that a command or a request asks for: stored as jobs of a run of their own.

The jobs are leased, retried and quarantined as those of a night; only the process that asked for
them uses their outcomes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flexq_bench.db import queries
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.fleet import abandon_jobs, add_jobs
from flexq_bench.db.leases import COMPARE
from flexq_bench.db.queries import JobRow
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.errors import BrokenRevisionError, InfrastructureError, UsageError
from flexq_bench.fleet.compare_jobs import (
    CompareJob,
    ComparisonWork,
    job_infos,
    stored_comparisons,
)
from flexq_bench.fleet.pool import Kind, Pool
from flexq_bench.measure.ab.rules import InterleaveRules, OnProgress
from flexq_bench.runs.lifecycle import new_run, open_run
from flexq_bench.runs.transactions import run_transaction
from flexq_bench.verdicts import CaseComparison, Comparison, confirm


@dataclass(frozen=True, slots=True)
class JobProgress:
    """State of a comparison that is carried out as jobs. left_s: not known."""

    done: int
    expected: int
    left_s: float | None = None

    @property
    def in_words(self) -> str:
        return f"{self.done} of {self.expected} parts compared"


@dataclass(frozen=True, slots=True)
class RunComparer:
    """Compares on all devices of a kind, by jobs of a run.

    devices: that measured each case last, by its key.
    """

    database: Database
    pool: Pool
    kind: Kind
    run: str  # uuid
    repository: Path
    devices: dict[str, DeviceInfo] = field(default_factory=dict)

    def compare(
        self,
        job: CompareJob,
        *,
        rules: InterleaveRules | None = None,
        on_progress: OnProgress = lambda state: None,
    ) -> list[CaseComparison]:
        """Compare the cases of a job and return one result for each.

        Cases that no device could compare have no data; the detail says why. Raises
        BrokenRevisionError if the code can't be compared, InfrastructureError if no case could be.
        """
        with self.database.session() as session:
            known = self._jobs(session)
        first = 1 + max((row.repetition for row in known), default=0)
        parts = list(job_infos([job], self.kind.devices, first=first))
        run_transaction(self.database, partial(add_jobs, run_uuid=self.run, jobs=parts))
        done = 0

        def count(_job: int) -> None:
            nonlocal done
            done += 1
            on_progress(JobProgress(done, len(parts)))

        on_progress(JobProgress(0, len(parts)))
        self.pool.compare([ComparisonWork(self.run, self.kind.gpu, self.repository, rules)], count)
        with self.database.session() as session:
            rows = [row for row in self._jobs(session) if row.repetition >= first]
            outcomes = queries.comparison_outcomes(session, self.run)
        return self._results(rows, {row.id: outcomes[row.id] for row in rows if row.id in outcomes})

    def _results(
        self, rows: Sequence[JobRow], outcomes: Mapping[int, object]
    ) -> list[CaseComparison]:
        asked = {row.id: CompareJob.from_data(row.content or {}) for row in rows}
        stored = stored_comparisons(asked, outcomes)
        reasons = {row.id: row.reason or f"the job is {row.state}" for row in rows}
        for row in rows:
            if row.state == "refused":
                raise BrokenRevisionError(reasons[row.id])
        if rows and not outcomes:
            raise InfrastructureError(reasons[rows[0].id])
        compared = zip(stored.comparisons, stored.devices, strict=True)
        self.devices.update((result.case.key, device) for result, device in compared)
        nothing = Comparison((), (), ())
        return stored.comparisons + [
            CaseComparison(
                case,
                asked[row.id].base,
                asked[row.id].head,
                nothing,
                confirm(nothing),
                detail=reasons[row.id],
            )
            for row in rows
            if row.id not in outcomes
            for case in asked[row.id].cases
        ]

    def _jobs(self, session: Session) -> list[JobRow]:
        return queries.jobs_of(session, self.run, kind=COMPARE)


@contextmanager
def comparing_run(
    database: Database, pool: Pool, kind: Kind, commit: CommitInfo, repository: Path, name: str
) -> Iterator[RunComparer]:
    """Begin a run for comparisons. name: of the command, which is the run's suite and trigger.

    commit: the newer one. repository: with the commits to compare.
    """
    with open_run(database, new_run(name, name, ()), commit) as run:
        uuid = run.info.uuid
        try:
            yield RunComparer(database, pool, kind, uuid, repository)
        finally:
            with suppress(DatabaseError), database.session() as session:
                abandon_jobs(session, uuid, "the command ended")


def only_kind(pool: Pool) -> Kind:
    """Return the kind of device that a comparison is carried out on.

    Raises UsageError if the pool has several.
    """
    kinds = pool.kinds
    if len(kinds) != 1:
        names = ", ".join(kind.gpu for kind in kinds)
        raise UsageError(
            f"a comparison needs one kind of device, and this cluster has {names}: "
            "say which with --gpus"
        )
    return kinds[0]
