"""`flexq-bench gate perf`: parse options, call the gate, write its reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flexq_bench.cli.compare import progress
from flexq_bench.cli.options import (
    DbOption,
    DeviceOption,
    JsonReportOption,
    JunitOption,
    KernelsFromOption,
    MarkdownOption,
    PolicyOption,
    ProcessesOption,
    ProjectOption,
    SeedOption,
)
from flexq_bench.cli.output import console, print_wrapped, say
from flexq_bench.cli.report_files import check_files, write_reports
from flexq_bench.errors import MissingResultsError
from flexq_bench.runs.command_lines import command
from flexq_bench.runs.result_files import STDOUT
from flexq_bench.workloads.probes import is_probe

if TYPE_CHECKING:
    from flexq_bench.ci.policy import Policy
    from flexq_bench.ci.report_data import GateReport
    from flexq_bench.db.records import CommitInfo
    from flexq_bench.verdicts import CaseComparison


def perf(
    base: Annotated[str, typer.Option("--base", metavar="REV", help="Revision to compare with.")],
    head: Annotated[str, typer.Option("--head", metavar="REV", help="Revision to judge.")] = "HEAD",
    policy: PolicyOption = "default",
    markdown: MarkdownOption = None,
    junit: JunitOption = None,
    as_json: JsonReportOption = None,
    alert: Annotated[
        bool,
        typer.Option("--alert", help="Open and close alerts; for the main branch."),
    ] = False,
    repository: Annotated[
        Path,
        typer.Option("--repository", metavar="FOLDER", help="Git checkout with both revisions."),
    ] = Path(),
    kernels_from: KernelsFromOption = None,
    project: ProjectOption = None,
    device: DeviceOption = None,
    processes: ProcessesOption = 6,
    seed: SeedOption = 0,
    trust_head: Annotated[
        bool,
        typer.Option(
            "--trust-head", help="Measure each revision with its own program; for reviewed code."
        ),
    ] = False,
    db: DbOption = None,
) -> None:
    """Compare two revisions, interleaved on one device, and check every case against a policy.

    Only kernels are head's: meter, checks, policy and suite are base's. Exit code 0: within the
    limits; 1: slower or wrong; 3: it can't be decided; 4: planned results are missing. Verdicts are
    stored with their evidence. A revision compared with itself measures the noise.
    """
    from flexq_bench.ci.gate_inputs import planned_cases
    from flexq_bench.ci.gate_perf import gate_perf, suffices
    from flexq_bench.ci.report_data import GateOutcome
    from flexq_bench.cli.external import code_with_failures, use_kernels_from
    from flexq_bench.cli.project import refuse_beside_project
    from flexq_bench.db.engine import open_database
    from flexq_bench.measure.ab import InterleaveRules
    from flexq_bench.repository.worktrees import repository_of

    use_kernels_from(kernels_from)
    files = {"--markdown": markdown, "--junit": junit, "--json": as_json}
    check_files(files)
    if project is not None:
        refuse_beside_project(kernels_from=kernels_from)
        gate_input = _input_of_project(project, base, head, policy, trust_head=trust_head)
    else:
        gate_input = _input_of_repository(
            repository_of(repository), base, head, policy, trust_head=trust_head
        )
    first, second, rules, notes = (
        gate_input.base,
        gate_input.head,
        gate_input.policy,
        gate_input.notes,
    )
    machine, name, plan = planned_cases(rules.suite, device)
    if project is not None:  # probes are this program's on both sides
        machine = replace(machine, project=first.project)
        plan = tuple(case for case in plan if not is_probe(case.kernel))
    measured = replace(InterleaveRules.with_processes(processes), suffices=partial(suffices, rules))
    out = console(stderr=as_json == STDOUT)
    with (
        open_database(db) as database,
        progress(len(plan) * measured.blocks_at_first) as on_block,
    ):
        report = gate_perf(
            rules,
            plan,
            partial(gate_input.compare, device=name, seed=seed, rules=measured, on_block=on_block),
            database,
            machine,
            first,
            second,
            alerting=alert,
            today=datetime.now(UTC).date(),
            notes=notes,
            trusts_head=trust_head,
        )
    _write(report, files)
    missing = report.with_outcome(GateOutcome.MISSING)
    if plan and len(missing) == len(report.findings):
        for note in report.notes:
            say(out, note)
        reason = missing[0].reason
        if project is not None and not trust_head and "does not import: KeyError" in reason:
            reason += (
                "; a gate passes on no variable of your environment: name those that kernels need "
                "under [variables] in flexq-bench.toml"
            )
        raise MissingResultsError(
            f"nothing of suite {report.suite} could be compared between {first.sha[:10]} and "
            f"{second.sha[:10]}: {reason}"
        )
    _print(report, out)
    raise typer.Exit(code_with_failures(int(report.exit_code)))


@dataclass(frozen=True, slots=True)
class _GateInput:
    """Input of a gate: the commits, the policy, the function that compares cases, and notes."""

    base: CommitInfo
    head: CommitInfo
    policy: Policy
    compare: Callable[..., Iterator[CaseComparison]]
    notes: tuple[str, ...]


def _input_of_repository(
    tree: Path, base: str, head: str, policy: str, *, trust_head: bool
) -> _GateInput:
    """Return the gate's input for commits of this repository."""
    from flexq_bench.ci.base_policy import load_policy_of
    from flexq_bench.ci.gate_inputs import judged_commit
    from flexq_bench.ci.policy import load_policy
    from flexq_bench.cli.external import with_external
    from flexq_bench.measure import ab as interleave

    first, second = (judged_commit(tree, revision) for revision in (base, head))
    rules = load_policy(policy) if trust_head else load_policy_of(tree, first.sha, policy)
    compare = interleave.compare_commits if trust_head else interleave.compare_judged
    return _GateInput(
        first,
        second,
        replace(rules, suite=with_external(rules.suite, None)),
        partial(compare, tree, first.sha, second.sha),
        () if trust_head else _notes(tree, first.sha, second.sha),
    )


def _input_of_project(
    folder: str, base: str, head: str, policy: str, *, trust_head: bool
) -> _GateInput:
    """Return the gate's input for commits of a project.

    Project file, suites and policies are base's; with trust_head, head's.
    """
    from flexq_bench.ci.policy import load_policy
    from flexq_bench.cli.project import use_project
    from flexq_bench.errors import UsageError
    from flexq_bench.measure import ab as interleave
    from flexq_bench.repository.project import project_notes, revision
    from flexq_bench.repository.worktrees import refuse_local_changes

    trusted = use_project(folder, head if trust_head else base)
    project = trusted.project
    first, second = (revision(project, text) for text in (base, head))
    refuse_local_changes(project.root, second.checkout)
    if second.commit.dirty or first.commit.dirty:
        raise UsageError(
            f"{project.root} has local changes, and a gate judges commits: commit or stash them "
            f"first, or see `flexq-bench compare {base} {head} --project {folder}`"
        )
    rules = trusted.policy() if policy == "default" else load_policy(policy)
    compare = interleave.compare_project if trust_head else interleave.compare_judged_project
    notes = () if trust_head else project_notes(project, first.checkout, second.checkout)
    return _GateInput(
        first.commit, second.commit, rules, partial(compare, project, first, second), notes
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


def _write(report: GateReport, files: dict[str, str | None]) -> None:
    from flexq_bench.ci.reports import perf as reports

    writers = {
        "--markdown": reports.markdown,
        "--junit": reports.junit,
        "--json": reports.as_json,
    }
    write_reports(report, files, writers)


def _print(report: GateReport, out: Console) -> None:
    from flexq_bench.ci.reports.perf import findings_table, headline

    table = findings_table(report)
    if table is not None:
        print_wrapped(out, table)
    for note in report.notes:
        say(out, note)
    for word, alerts in (
        ("opened", report.opened),
        ("joined", report.joined),
        ("fixed", report.fixed),
    ):
        for alert in alerts:
            say(out, f"{word} alert {alert}: {command('explain', str(alert))}")
    say(out, headline(report))
