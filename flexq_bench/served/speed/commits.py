"""Speed of the engines that two commits of a project build, as `bisect` compares commits."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace

from flexq_bench.errors import BrokenRevisionError, InfrastructureError, UsageError
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.repository.project import Project, ServeTable
from flexq_bench.repository.project_builds import BuiltTree, built_tree
from flexq_bench.served.engines import EngineSpec, engine
from flexq_bench.served.speed.gate import judge_speed
from flexq_bench.served.speed.policy import SpeedTable
from flexq_bench.served.turns import BASE, HEAD, Places, taking_turns
from flexq_bench.verdicts import CaseComparison
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.data_files import read_toml, validated
from flexq_bench.workloads.operation import OperationWorkload


def serve_table(project: Project) -> ServeTable:
    """Return how a project's engine is served. Raises UsageError if the file does not say it."""
    if project.file.serve is None:
        raise UsageError(f"project {project.name} has no engine: add [serve] to flexq-bench.toml")
    return project.file.serve


def engine_of_commit(project: Project, commit: str, name: str) -> EngineSpec:
    """Build a commit, and return its engine, which starts in the folder of the build.

    commit: as of ProjectRevision.checkout. name: of the engine in messages. Raises BuildError,
    UsageError, WorkloadError.
    """
    own = project.at(commit)
    return _engine(built_tree(own, commit), serve_table(own), name)


def tables_of_commit(project: Project, commit: str) -> list[SpeedTable]:
    """Return the tables [[speed]] of the policy in a commit.

    Raises UsageError if it has none, WorkloadError for an invalid one.
    """
    own = project.at(commit)
    file = built_tree(own, commit).folder / serve_table(own).policy
    entries = read_toml(file).get("speed", [])
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{file.name} of {commit[:10]} has no [[speed]]: add one")
    tables = []
    for number, entry in enumerate(entries, start=1):
        values = entry if isinstance(entry, dict) else {}
        table = validated(SpeedTable, values, f"{file.name}, speed {number}")
        tables.append(table.beside(file.parent))
    return tables


def table_of_case(tables: Sequence[SpeedTable], case: Case) -> SpeedTable:
    """Return the table of a case, with only its metric. Raises UsageError if there is none."""
    for table in tables:
        for metric in table.judged:
            if table.case(case.kernel, metric).workload == case.workload:
                return table.model_copy(update={"metrics": (metric.name,), "limits": {}})
    assert isinstance(case.workload, OperationWorkload)
    known = [table.case(case.kernel, metric).key for table in tables for metric in table.judged]
    raise UsageError(f"no load of the policy is {case.key}: there are {'; '.join(known)}")


def compare_engines(
    project: Project,
    base: str,
    head: str,
    case: Case,
    *,
    gpus: Sequence[str] = (),
    seed: int = 0,
    rules: InterleaveRules | None = None,
) -> CaseComparison:
    """Compare a metric of the engines of two commits, by the load of base's policy.

    Raises BrokenRevisionError if head does not build, start or answer, InfrastructureError if base
    does not.
    """
    table = table_of_case(tables_of_commit(project, base), case)
    mine, other = (
        engine_of_commit(project, commit, name) for commit, name in ((base, BASE), (head, HEAD))
    )
    places = Places(tuple(gpus), ready_within_s=serve_table(project.at(base)).ready_within_s)
    with taking_turns(mine, other, places) as turns:
        report = judge_speed(
            [table], turns, seed=seed, rules=rules, labels={BASE: base, HEAD: head}
        )
    if problem := report.problem or report.measured[0].unsound:
        kind = BrokenRevisionError if problem.startswith(HEAD) else InfrastructureError
        raise kind(problem)
    (compared,) = report.comparisons
    return replace(compared, case=case)


def _engine(built: BuiltTree, table: ServeTable, name: str) -> EngineSpec:
    """Return the engine of a built commit."""
    spec = engine(name, table.command)
    if not spec.is_started_here:
        raise UsageError("[serve] has a URL: give the command that starts a commit's engine")
    command = f"cd {shlex.quote(str(built.folder))} && exec {shlex.join(spec.command)}"
    new = {
        variable: value
        for variable, value in built.environment().items()
        if os.environ.get(variable) != value
    }
    return replace(
        spec, command=("/bin/sh", "-c", command), environment={**new, **spec.environment}
    )
