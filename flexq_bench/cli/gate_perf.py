"""`flexq-bench gate perf`: parse options, call the gate, write its reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flexq_bench.cli.comparison_progress import progress
from flexq_bench.cli.external import (
    KernelSourceOptions,
    OpenedProject,
    code_with_failures,
    use_judged_project,
    use_project,
    with_external,
)
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import (
    ClusterOptions,
    DbOption,
    InterleavingOptions,
    SpendingOptions,
)
from flexq_bench.cli.output import console, print_wrapped, say
from flexq_bench.cli.reports import (
    BaseOption,
    BothRevisionsOption,
    JunitReportOptions,
    PolicyOption,
)
from flexq_bench.errors import MissingResultsError, UsageError
from flexq_bench.runs.command_lines import command, database_arguments
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import is_probe

if TYPE_CHECKING:
    # Servers of a gate import as long as this process, so they start before it imports these.
    from flexq_bench.ci.policy import Policy
    from flexq_bench.ci.report_data import GateReport
    from flexq_bench.db.engine import Database
    from flexq_bench.db.records import CommitInfo, DeviceInfo
    from flexq_bench.measure.ab.rules import OnProgress, ShownProgress
    from flexq_bench.measure.sandbox import Kind
    from flexq_bench.repository.project import Project, ProjectRevision
    from flexq_bench.runs.machine import Machine
    from flexq_bench.verdicts import CaseComparison

_NO_SANDBOX = (
    "no sandbox (--no-sandbox): head's code could use the network, and read and write what this "
    "user may; of the files that both sides run from, only changes of the two trees are found"
)


@takes_option_groups
def perf(
    *,
    base: BaseOption,
    head: Annotated[str, typer.Option(metavar="REV", help="Revision to judge.")] = "HEAD",
    policy: PolicyOption = "default",
    output: JunitReportOptions,
    alert: Annotated[
        bool,
        typer.Option("--alert", help="Open and close alerts; for the main branch."),
    ] = False,
    repository: BothRevisionsOption = Path(),
    sources: KernelSourceOptions,
    place: ClusterOptions,
    interleaving: InterleavingOptions,
    spending: SpendingOptions,
    trust_head: Annotated[
        bool,
        typer.Option(
            "--trust-head", help="Measure each revision with its own program; for reviewed code."
        ),
    ] = False,
    no_sandbox: Annotated[
        bool,
        typer.Option(
            "--no-sandbox",
            help="Run head's code without a sandbox: see the threat model.",
        ),
    ] = False,
    db: DbOption = None,
) -> None:
    """Compare two revisions, interleaved on one device, and check every case against a policy.

    Only kernels are head's: meter, checks, policy and suite are base's. All results of head are
    checked before anything is timed; a wrong one ends the gate. Exit code 0: within the limits; 1:
    slower or wrong; 3: it can't be decided; 4: planned results are missing. Verdicts are stored
    with their evidence. A revision compared with itself measures the noise.
    """
    sources.use_kernels()
    output.check()
    if no_sandbox and not place.is_local:
        raise UsageError("--no-sandbox is for this process: a cluster's nodes have sandboxes")
    with ExitStack() as stack:
        shown = stack.enter_context(progress())
        if sources.project is None:
            judged = _input_of_repository(repository, base, head, policy, trust_head=trust_head)
            if no_sandbox and not trust_head:
                judged = replace(judged, compare=partial(judged.compare, sandbox="none"))
        elif trust_head or not place.is_local:
            judged = _input_of_project(
                sources.project, base, head, policy, trust_head=trust_head, builds=place.is_local
            )
        else:
            kind: Kind | None = "none" if no_sandbox else None
            judged = _input_of_judged_project(
                stack, sources.project, base, head, policy, place, kind
            )
        # This imports torch, which takes as long as the imports of servers that start above.
        rules = spending.applied_to(interleaving.rules)
        from flexq_bench.ci.gate_inputs import suffices

        if no_sandbox and not trust_head:
            judged = replace(judged, notes=(_NO_SANDBOX, *judged.notes))
        opening = stack.enter_context(_opened_meanwhile(db))
        on_progress = _failing_with(opening, shown)
        opened = stack.enter_context(
            _opened_place(opening, place, interleaving.seed, judged, trust_head=trust_head)
        )
        machine, plan = opened.machine, opened.plan
        if sources.project is not None:  # probes are this program's on both sides
            machine = replace(machine, project=judged.base.project)
            plan = tuple(case for case in plan if not is_probe(case.kernel))
        rules = replace(rules, suffices=partial(suffices, judged.policy.on(machine.device.sku)))
        compared = list(opened.compare(plan, rules=rules, on_progress=on_progress))
        database = opening.result()
        from flexq_bench.ci.gate_perf import gate_perf
        from flexq_bench.ci.reports import perf as reports

        report = gate_perf(
            judged.policy,
            plan,
            lambda _cases: iter(compared),
            database,
            machine,
            judged.base,
            judged.head,
            alerting=alert,
            today=datetime.now(UTC).date(),
            notes=judged.notes,
            trusts_head=trust_head,
            devices=opened.devices,
        )
    output.write(report, markdown=reports.markdown, junit=reports.junit, json=reports.as_json)
    out = console(stderr=output.use_stdout)
    if plan:
        _check_compared(
            report, judged, out, is_isolated=sources.project is not None and not trust_head
        )
    _print(report, out, database_arguments(database))
    raise typer.Exit(code_with_failures(int(report.exit_code)))


@contextmanager
def _opened_meanwhile(db: str | None) -> Iterator[Future[Database]]:
    """A database that a thread opens, while this one waits for the first results.

    To import what stores and reports verdicts, and to create a file, takes more than a second.
    """

    def opened() -> Database:
        for module in ("gate_perf", "reports.perf"):
            import_module(f"flexq_bench.ci.{module}")
        from flexq_bench.db.engine import open_database

        return resources.enter_context(open_database(db))

    with ExitStack() as resources, ThreadPoolExecutor(1) as thread:
        yield thread.submit(opened)


def _failing_with(opening: Future[Database], on_progress: OnProgress) -> OnProgress:
    """A function that shows progress, and raises the error of a database that does not open."""

    def shown(progress: ShownProgress) -> None:
        if opening.done():
            opening.result()
        on_progress(progress)

    return shown


@dataclass(frozen=True, slots=True)
class _OpenedPlace:
    """A device of this process, or those of a kind of a cluster, and the cases of the gate on it.

    compare: called with cases, the rules, and a function that shows progress. devices: as in
    gate_perf.
    """

    machine: Machine
    plan: tuple[Case, ...]
    compare: Callable[..., Iterator[CaseComparison]]
    devices: Mapping[str, DeviceInfo]


@contextmanager
def _opened_place(
    opening: Future[Database],
    place: ClusterOptions,
    seed: int,
    judged: _GateInput,
    *,
    trust_head: bool,
) -> Iterator[_OpenedPlace]:
    from flexq_bench.ci.gate_inputs import local_machine, planned_cases

    suite = judged.policy.suite
    if place.is_local:
        device = place.device_name()
        machine, capability = local_machine(device)
        plan = planned_cases(suite, machine.backend, capability)
        yield _OpenedPlace(machine, plan, partial(judged.compare, device=device, seed=seed), {})
        return
    from flexq_bench.cli.on_cluster import Comparing, cluster_comparer

    comparing = Comparing("gate", judged.head, judged.repository, judged.opened)
    with cluster_comparer(opening.result(), place, seed, comparing) as cluster:
        ends, kind = (judged.base.sha, judged.head.sha), cluster.kind
        plan = planned_cases(suite, kind.backend, kind.capability)
        compare = partial(cluster.compare, *ends, judged=not trust_head)
        yield _OpenedPlace(cluster.machine, plan, compare, cluster.devices)


@dataclass(frozen=True, slots=True)
class _GateInput:
    """Input of a gate: the commits, the policy, the function that compares cases, and notes.

    repository: with the commits. opened: their project; None: this repository.
    """

    base: CommitInfo
    head: CommitInfo
    policy: Policy
    compare: Callable[..., Iterator[CaseComparison]]
    notes: tuple[str, ...]
    repository: Path
    opened: OpenedProject | None = None


def _input_of_repository(
    repository: Path, base: str, head: str, policy: str, *, trust_head: bool
) -> _GateInput:
    """Return the gate's input for commits of the repository that contains a folder."""
    from flexq_bench.ci.base_policy import load_policy_of
    from flexq_bench.ci.gate_inputs import judged_commit
    from flexq_bench.ci.policy import load_policy
    from flexq_bench.measure import ab as interleave
    from flexq_bench.repository.worktrees import repository_of

    tree = repository_of(repository)
    first, second = (judged_commit(tree, revision) for revision in (base, head))
    rules = load_policy(policy) if trust_head else load_policy_of(tree, first.sha, policy)
    compare = interleave.compare_commits if trust_head else interleave.compare_judged
    return _GateInput(
        first,
        second,
        replace(rules, suite=with_external(rules.suite, None)),
        partial(compare, tree, first.sha, second.sha),
        () if trust_head else _notes(tree, first.sha, second.sha),
        tree,
    )


def _input_of_project(
    folder: str, base: str, head: str, policy: str, *, trust_head: bool, builds: bool
) -> _GateInput:
    """Return the gate's input for commits of a project.

    Project file, suites and policies are base's; with trust_head, head's.
    """
    from flexq_bench.measure import ab as interleave
    from flexq_bench.repository.project import project_notes, revision

    trusted = use_project(folder, head if trust_head else base, builds=builds)
    project = trusted.project
    first, second = (revision(project, text) for text in (base, head))
    _refuse_changes(project, first, second)
    compare = interleave.compare_project if trust_head else interleave.compare_judged_project
    notes = () if trust_head else project_notes(project, first.checkout, second.checkout)
    measure = partial(compare, project, first, second)
    rules = _policy_of(trusted, policy)
    return _GateInput(first.commit, second.commit, rules, measure, notes, project.root, trusted)


def _input_of_judged_project(
    stack: ExitStack,
    folder: str,
    base: str,
    head: str,
    policy: str,
    place: ClusterOptions,
    sandbox: Kind | None,
) -> _GateInput:
    """Return the gate's input for commits of a project on this machine, which the stack closes.

    Both are built, and base's kernels described, in the sandboxes of the comparison.
    """
    from flexq_bench.measure.judged_places import judged_places, trees_built_in
    from flexq_bench.measure.program import loading
    from flexq_bench.repository.project import open_project, project_notes, revision

    opened = open_project(folder)
    first = revision(opened, base)
    project = opened.at(first.checkout)
    second = revision(project, head)
    _refuse_changes(project, first, second)
    places = stack.enter_context(judged_places(project.file.variables, sandbox))
    with _importing("flexq_bench.measure.ab", "flexq_bench.ci.gate_inputs"):
        built = trees_built_in(places, project, (first, second))
        where = places["base"]
        load = partial(
            loading, environment=built[0].environment(where.variables), launcher=where.launcher
        )
        loaders = {source: stack.enter_context(load(source)) for source in built[0].sources}
    from flexq_bench.measure.ab import judged_project

    device = place.device_name()
    judged = stack.enter_context(
        judged_project(project, first, second, places, built, device=device)
    )
    trusted = use_judged_project(judged, loaders)
    notes = project_notes(project, first.checkout, second.checkout)
    rules = _policy_of(trusted, policy)
    return _GateInput(
        first.commit, second.commit, rules, judged.compare, notes, project.root, trusted
    )


@contextmanager
def _importing(*modules: str) -> Iterator[None]:
    """Import modules, which takes seconds with torch, while the block waits for processes.

    The block imports nothing. An error comes again where a module is used.
    """

    def run() -> None:
        with suppress(Exception):
            for module in modules:
                import_module(module)

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _policy_of(opened: OpenedProject, policy: str) -> Policy:
    from flexq_bench.ci.policy import load_policy

    return opened.policy() if policy == "default" else load_policy(policy)


def _refuse_changes(project: Project, base: ProjectRevision, head: ProjectRevision) -> None:
    from flexq_bench.repository.worktrees import refuse_local_changes

    refuse_local_changes(project.root, head.checkout)
    if head.commit.dirty or base.commit.dirty:
        names = ("." if each.commit.dirty else each.commit.sha[:10] for each in (base, head))
        raise UsageError(
            f"{project.root} has local changes, and a gate judges commits: commit or stash them "
            f"first, or see `flexq-bench compare {' '.join(names)} --project {project.root}`"
        )


def _notes(repository: Path, base: str, head: str) -> tuple[str, ...]:
    """Notes on changes of head that the gate doesn't use."""
    from flexq_bench.measure.ab.judged_tree import judged_tree
    from flexq_bench.repository.provenance import current_commit

    notes = judged_tree(repository, base, head).notes
    if base != head == current_commit().sha:
        return (
            "this program is head's own: run the gate from an installation of base or of a release",
            *notes,
        )
    return notes


def _check_compared(
    report: GateReport, judged: _GateInput, out: Console, *, is_isolated: bool
) -> None:
    """Raise MissingResultsError if no case could be compared.

    is_isolated: kernels were measured without the variables of this process's environment.
    """
    from flexq_bench.ci.report_data import GateOutcome

    missing = report.with_outcome(GateOutcome.MISSING)
    if len(missing) < len(report.findings):
        return
    for note in report.notes:
        say(out, note)
    reason = missing[0].reason
    if is_isolated and "does not import: KeyError" in reason:
        reason += (
            "; a gate passes on no variable of your environment: name those that kernels need "
            "under [variables] in flexq-bench.toml"
        )
    raise MissingResultsError(
        f"nothing of suite {report.suite} could be compared between {judged.base.sha[:10]} and "
        f"{judged.head.sha[:10]}: {reason}"
    )


def _print(report: GateReport, out: Console, options: tuple[str, ...]) -> None:
    from flexq_bench.ci.reports.perf import findings_table, headline

    table = findings_table(report)
    if table is not None:
        print_wrapped(out, table)
    for note in report.notes:
        say(out, note)
    for change in ("opened", "joined", "fixed"):
        for alert in getattr(report, change):
            say(out, f"{change} alert {alert}: {command('explain', str(alert), *options)}")
    say(out, headline(report))
