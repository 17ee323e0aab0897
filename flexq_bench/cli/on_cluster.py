"""Comparisons on a cluster: `--cluster` of `compare`, `gate perf` and `bisect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexq_bench.cli.external import OpenedProject
from flexq_bench.cli.options import ClusterOptions
from flexq_bench.db.engine import Database
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.workloads.case import Case

if TYPE_CHECKING:
    from flexq_bench.fleet.pool import Kind
    from flexq_bench.fleet.run_comparer import RunComparer
    from flexq_bench.measure.ab import InterleaveRules
    from flexq_bench.measure.ab.rules import OnProgress
    from flexq_bench.runs.machine import Machine
    from flexq_bench.verdicts import CaseComparison


@dataclass(frozen=True, slots=True)
class Comparing:
    """Commits or kernels that a command compares on a cluster.

    command: its name. commit: the newer one. repository: with the commits. opened: their project,
    of which one revision's kernels are planned; None: this repository. names: of commits in
    results, by the commit to check out, where they differ. gpu: only this kind.
    """

    command: str
    commit: CommitInfo
    repository: Path
    opened: OpenedProject | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterComparer:
    """Compares on the devices of one kind of a cluster, as compare_commits does on one device."""

    comparer: RunComparer
    comparing: Comparing

    @property
    def kind(self) -> Kind:
        """The kind of device."""
        return self.comparer.kind

    @property
    def machine(self) -> Machine:
        """One of the devices."""
        return self.comparer.pool.machine(self.kind.gpu)

    @property
    def devices(self) -> Mapping[str, DeviceInfo]:
        """The device that measured each case last, by its key."""
        return self.comparer.devices

    def compare(
        self,
        base: str,
        head: str,
        cases: Sequence[Case],
        *,
        rules: InterleaveRules,
        on_progress: OnProgress,
        judged: bool = False,
        kernels: bool = False,
    ) -> Iterator[CaseComparison]:
        """Yield one result per case. base, head: commits to check out, or kernels' labels.

        judged: head is not trusted. kernels: two kernels are compared. Raises BrokenRevisionError,
        InfrastructureError.
        """
        from flexq_bench.fleet.compare_jobs import CompareJob

        job = CompareJob(
            base, head, tuple(cases), self.comparing.commit.project, judged=judged, kernels=kernels
        )
        names = {base: base, head: head} | dict(self.comparing.names)
        for result in self.comparer.compare(job, rules=rules, on_progress=on_progress):
            yield replace(result, base=names[result.base], head=names[result.head])


@contextmanager
def cluster_comparer(
    database: Database, place: ClusterOptions, seed: int, comparing: Comparing
) -> Iterator[ClusterComparer]:
    """Open the cluster, and begin a run for the comparisons of a command.

    Raises UsageError if the cluster has several kinds of device, MissingResultsError if no kernel
    of the project loads, and errors of opening the pool.
    """
    from flexq_bench.fleet import open_pool
    from flexq_bench.fleet.run_comparer import comparing_run, only_kind

    opened, commit = comparing.opened, comparing.commit
    options = place.pool(seed, project=None if opened is None else opened.measured)
    if comparing.gpu is not None and not options.gpus:
        options = replace(options, gpus=(comparing.gpu,))
    with open_pool(database, options, commit) as pool:
        if opened is not None:
            opened.check_loaded()
        kind = only_kind(pool)
        where = comparing.repository
        with comparing_run(database, pool, kind, commit, where, comparing.command) as run:
            yield ClusterComparer(run, comparing)
