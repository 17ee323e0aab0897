"""Inputs of the performance gate: the commits, the device, the cases, and when each is decided."""

from __future__ import annotations

from pathlib import Path

from flexq_bench.ci.policy import Policy
from flexq_bench.db.records import CommitInfo
from flexq_bench.kernels.contract import Backend, Capability
from flexq_bench.measure.device import capability, device_info, find_device
from flexq_bench.repository.provenance import commit_at
from flexq_bench.repository.worktrees import refuse_local_changes, resolve_revision
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.plan import build_plan
from flexq_bench.verdicts import CaseComparison
from flexq_bench.verdicts.limits import is_enough
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import EMPTY_KERNEL
from flexq_bench.workloads.suite import Suite


def local_machine(device: str) -> tuple[Machine, Capability | None]:
    """Return a device of this process, by its name in torch, and its capability."""
    opened = find_device(device)
    backend: Backend = "cpu" if opened.type == "cpu" else "cuda"
    return Machine(backend, device_info(device)), capability(opened)


def planned_cases(
    suite: Suite, backend: Backend, capability: Capability | None
) -> tuple[Case, ...]:
    """Return the suite's cases on a device with their probes.

    The empty kernel is left out, as no commit can slow it down.
    """
    plan = build_plan(suite, backend, capability)
    return tuple(case for case in plan.cases if case.kernel != EMPTY_KERNEL)


def judged_commit(repository: Path, revision: str) -> CommitInfo:
    """Return the commit of a revision. Raises UsageError for local changes or no such revision."""
    sha = resolve_revision(repository, revision)
    refuse_local_changes(repository, sha)
    return commit_at(repository, sha)


def suffices(policy: Policy, result: CaseComparison, decided: bool) -> bool:
    """Return True if the gate needs no more placements of a case (verdicts.limits.is_enough)."""
    limit = policy.limit_of(result.case).slower_percent
    return is_enough(result.confirmation, limit, decided=decided)
