"""Sweeps with the cases of an earlier run, and queued sweeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flexq_bench.cli.measuring import RunOptions
from flexq_bench.cli.output import say
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.errors import UsageError
from flexq_bench.fleet.requests import submit, sweep_request
from flexq_bench.runs import command_lines as invocation
from flexq_bench.sweeps.sweep import Sweep
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import is_probe
from flexq_bench.workloads.suite import Group, Shape, Suite


def suite_like(
    prefix: str, kernels: Sequence[str] | None, m: Sequence[int] | None, db: str | None
) -> Suite:
    """Build a suite of a stored run's cases, without its probes, which planning adds.

    kernels, m: replace the run's own; None: its own. Raises NotFoundError, UsageError.
    """
    with open_database(db, create=False) as database, database.session() as session:
        run = queries.run_info(session, queries.run_by_uuid_prefix(session, prefix).uuid)
        names = {
            (row.n, row.k): Shape(row.n, row.k, row.layer, row.model)
            for row in queries.run_results(session, run.uuid)
        }
    cases = [case for case in map(Case.from_key, run.plan) if not is_probe(case.kernel)]
    if not cases:
        raise UsageError(f"run {run.uuid[:8]} planned no kernel: there is nothing to be like")
    groups: dict[Group, None] = {}
    sizes: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for case in cases:
        sizes[_place(case)].add(case.gemm.m)
    for case in cases:
        g = case.gemm
        own = sizes[_place(case)]
        shape = names.get((g.n, g.k), Shape(g.n, g.k, layer=""))
        group = Group(
            tuple(kernels or (case.label,)),
            tuple(m or sorted(own)),
            (shape,),
            (case.stage,),
            (case.cache,),
            (case.regime,),
        )
        groups[group] = None
    return Suite("sweep", f"like run {run.uuid[:8]} of {run.suite}", "", tuple(groups))


def _place(case: Case) -> tuple[object, ...]:
    return (case.label, case.gemm.n, case.gemm.k, case.stage, case.cache, case.regime)


def queue_sweep(sweep: Sweep, options: RunOptions) -> None:
    """Queue a sweep as a request. Raises UsageError, LimitError."""
    gpus = options.pool.gpus
    if len(gpus) > 1:
        raise UsageError(f"--queue takes one kind of GPU, got {', '.join(gpus)}: queue one each")
    with open_database(options.db) as database, database.session() as session:
        request = sweep_request(
            session,
            sweep,
            requester=invocation.user_name(),
            gpu="".join(gpus),
            backend=options.pool.backend or "cuda",
        )
        submit(session, request)
        arguments = invocation.database_arguments(database)
    took = "" if request.expected_s is None else f", about {request.expected_s:.0f} s"
    say(options.people, f"queued request {request.uuid[:8]}: {request.cases} cases{took}")
    say(options.people, f"see how far it is: {invocation.command('status', *arguments)}")
