"""Cases of a stored run as a suite, to measure them again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexq_bench.db import queries
from flexq_bench.errors import UsageError
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import OperationWorkload
from flexq_bench.workloads.probes import is_probe
from flexq_bench.workloads.suite import Group, OperationGroup, Shape, Suite

if TYPE_CHECKING:
    from flexq_bench.db.engine import Session


def suite_like(
    session: Session, prefix: str, kernels: Sequence[str] | None, m: Sequence[int] | None
) -> Suite:
    """Build a suite of a stored run's cases, without its probes, which planning adds.

    kernels, m: replace the run's own; None: its own. Raises NotFoundError, UsageError.
    """
    run = queries.run_info(session, queries.run_by_uuid_prefix(session, prefix).uuid)
    names = {
        (row.n, row.k): Shape(row.n, row.k, row.layer, row.model)
        for row in queries.run_results(session, run.uuid)
        if row.n is not None and row.k is not None
    }
    cases = [case for case in map(Case.from_key, run.plan) if not is_probe(case.kernel)]
    if not cases:
        raise UsageError(f"run {run.uuid[:8]} planned no kernel: there is nothing to be like")
    others = [case for case in cases if isinstance(case.workload, OperationWorkload)]
    cases = [case for case in cases if case not in set(others)]
    sizes: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for case in cases:
        sizes[_all_but_m(case)].add(case.gemm.m)
    groups = dict.fromkeys(
        Group(
            tuple(kernels or (case.label,)),
            tuple(m or sorted(sizes[_all_but_m(case)])),
            (names.get((case.gemm.n, case.gemm.k), Shape(case.gemm.n, case.gemm.k, layer="")),),
            (case.stage,),
            (case.cache,),
            (case.regime,),
        )
        for case in cases
    )
    other_groups = dict.fromkeys(
        OperationGroup(
            tuple(kernels or (case.label,)), (case.workload,), (case.cache,), (case.regime,)
        )
        for case in others
        if m is None and isinstance(case.workload, OperationWorkload)
    )
    description = f"like run {run.uuid[:8]} of {run.suite}"
    return Suite("sweep", description, "", (*tuple(groups), *tuple(other_groups)))


def _all_but_m(case: Case) -> tuple[object, ...]:
    return (case.label, case.gemm.n, case.gemm.k, case.stage, case.cache, case.regime)
