"""Commands that repeat one decision of an alert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexq_bench.runs.command_lines import command, database_arguments
from flexq_bench.verdicts import history_verdict
from flexq_bench.workloads.case import Case, kernel_label, stored_case
from flexq_bench.workloads.suites import list_suites, load_suite

if TYPE_CHECKING:
    from flexq_bench.db.engine import Database
    from flexq_bench.db.queries import AlertRow, DecisionRow

_SHA = 10


@dataclass(frozen=True, slots=True)
class AlertCommands:
    """Command lines. compare, bisect None: there is no last good commit, or another tool measured
    the results; bisect alone: no commit lies between.

    suite: contents of the suite file in `compare`; empty: the suite is part of the package.
    """

    compare: str | None
    bisect: str | None
    explain: str
    suite: str = ""


def alert_commands(alert: AlertRow, decision: DecisionRow, database: Database) -> AlertCommands:
    """Build commands that compare the decision's commits, bisect, and show the evidence."""
    arguments = database_arguments(database)
    explain = command("explain", str(alert.id), *arguments)
    if decision.base is None or alert.good is None or not can_be_repeated(decision):
        return AlertCommands(None, None, explain)
    case = case_of(decision)
    label = case.label
    place, suite = _place_in_a_suite(case, f"alert-{alert.id}.toml")
    project = project_arguments(alert)
    compare = command(
        *("compare", decision.base[:_SHA], decision.head[:_SHA]),
        *(project or ("--kind", "commits")),
        *(*place, "--kernels", label, *(() if decision.m is None else ("--m", str(decision.m)))),
        *("--stage", decision.stage, "--cache", decision.cache, *arguments),
    )
    commits = ("--good", alert.good.sha[:_SHA], "--bad", alert.bad.sha[:_SHA])
    bisect = None
    if not is_one_step(alert):
        bisect = command("bisect", str(decision.series_id), *commits, *project, *arguments)
    return AlertCommands(compare, bisect, explain, suite)


def is_one_step(alert: AlertRow) -> bool:
    """Return True if no commit of the main line lies between the last good and first bad one."""
    if alert.good is None:
        return False
    good, bad = alert.good.topo_order, alert.bad.topo_order
    return good is not None and bad is not None and bad - good <= 1


def can_be_repeated(decision: DecisionRow) -> bool:
    """Return True if the decision's results are not of another tool."""
    return decision.detector != history_verdict.DETECTOR


def case_of(decision: DecisionRow) -> Case:
    """The decision's case."""
    label = kernel_label(decision.kernel, decision.variant)
    place = (decision.stage, decision.cache, decision.operation, decision.shape)
    return Case.from_key(stored_case(label, *place))


def project_arguments(alert: AlertRow) -> tuple[str, ...]:
    """Options for an alert of a project, for use in a clone of it; else empty."""
    return ("--project", ".") if alert.bad.project else ()


def _place_in_a_suite(case: Case, file: str) -> tuple[tuple[str, ...], str]:
    """Options of `compare` that select the case's shape, and the text of a suite file with the
    shape, which is empty if a suite of the package has it."""
    for name in list_suites():
        for suite_case in load_suite(name).cases([case.label]):
            if suite_case == case:
                model = ("--models", suite_case.model) if suite_case.model else ()
                return ("--suite", name, *model, "--layers", suite_case.layer), ""
    lines = (
        f'description = "{case.key}"',
        "[[group]]",
        f'kernels = ["{case.label}"]',
        f'm = "{case.gemm.m}"',
        f'shapes = ["{case.gemm.n}x{case.gemm.k}"]',
        f'stages = ["{case.stage}"]',
        f'caches = ["{case.cache}"]',
    )
    return ("--suite", file), "\n".join(lines)
