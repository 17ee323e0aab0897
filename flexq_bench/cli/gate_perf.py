"""`flexq-bench gate perf`: parse, call the gate, write its reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flexq_bench.cli.options import (
    DbOption,
    DeviceOption,
    JsonReportOption,
    JunitOption,
    MarkdownOption,
    PolicyOption,
    SeedOption,
)
from flexq_bench.cli.output import console, say, show_by_words
from flexq_bench.cli.progress import progress
from flexq_bench.cli.report_files import check_files, write_reports
from flexq_bench.errors import MissingResultsError
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.runs.command_lines import command
from flexq_bench.runs.result_files import STDOUT
from workloads.case import Case

if TYPE_CHECKING:
    from ci.gate_perf import GateReport
    from flexq_bench.verdicts import Compared, Comparer


def perf(
    base: Annotated[str, typer.Option("--base", metavar="REV", help="What to compare with.")],
    head: Annotated[str, typer.Option("--head", metavar="REV", help="What to judge.")] = "HEAD",
    policy: PolicyOption = "default",
    markdown: MarkdownOption = None,
    junit: JunitOption = None,
    as_json: JsonReportOption = None,
    alert: Annotated[
        bool,
        typer.Option("--alert", help="Open and close alerts: for the line that people watch."),
    ] = False,
    repository: Annotated[
        Path, typer.Option("--repository", metavar="FOLDER", help="The git tree that has both.")
    ] = Path(),
    device: DeviceOption = None,
    seed: SeedOption = 0,
    trust_head: Annotated[
        bool,
        typer.Option("--trust-head", help="Measure each with its own program, for reviewed code."),
    ] = False,
    db: DbOption = None,
) -> None:
    """Compare two revisions, interleaved on one device, and hold every case against a policy.

    Only kernels are head's: meter, checks, policy and suite are base's. Exit code 0: within the
    limits; 1: slower or wrong; 3: it can't be told; 4: planned results are missing. Verdicts are
    stored with their evidence. A revision against itself measures the noise.
    """
    from ci.base_policy import load_policy_of
    from ci.gate_perf import gate_perf
    from ci.judged import judged_commit, planned_cases
    from ci.policy import load_policy
    from db.engine import open_database
    from flexq_bench.repository.worktrees import repository_of

    files = {"--markdown": markdown, "--junit": junit, "--json": as_json}
    check_files(files)
    tree = repository_of(repository)
    first, second = (judged_commit(tree, revision) for revision in (base, head))
    rules = load_policy(policy) if trust_head else load_policy_of(tree, first.sha, policy)
    machine, name, plan = planned_cases(rules.suite, device)
    notes = () if trust_head else _notes(tree, first.sha, second.sha)
    out = console(stderr=as_json == STDOUT)
    with (
        open_database(db) as database,
        ended_by_terminate(),
        progress("comparing", len(plan)) as bar,
    ):
        report = gate_perf(
            rules,
            plan,
            _comparer(tree, first.sha, second.sha, name, seed, trust_head=trust_head),
            database,
            machine,
            first,
            second,
            alerting=alert,
            today=datetime.now(UTC).date(),
            on_result=lambda compared: bar.advance(compared.case.key),
            notes=notes,
            trusts_head=trust_head,
        )
    _write(report, files)
    if plan and report.compared == 0:
        raise MissingResultsError(
            f"nothing of suite {report.suite} could be compared between {first.sha[:10]} and "
            f"{second.sha[:10]}: {report.findings[0].reason}"
        )
    _print(report, out)
    raise typer.Exit(int(report.exit_code))


def _comparer(
    repository: Path, base: str, head: str, device: str, seed: int, *, trust_head: bool
) -> Comparer:
    from flexq_bench.measure import ab as interleave

    by = interleave.compare_commits if trust_head else interleave.compare_judged

    def compare(cases: Sequence[Case]) -> Iterator[Compared]:
        return by(repository, base, head, cases, device=device, seed=seed)

    return compare


def _notes(repository: Path, base: str, head: str) -> tuple[str, ...]:
    """What head changes and is not judged by."""
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
    from ci import reports

    writers = {
        "--markdown": reports.markdown,
        "--junit": reports.junit,
        "--json": reports.as_json,
    }
    write_reports(report, files, writers)


def _print(report: GateReport, out: Console) -> None:
    from ci import reports
    from ci.reports.terminal import findings_table

    table = findings_table(report)
    if table is not None:
        show_by_words(out, table)
    for note in report.notes:
        say(out, note)
    for word, alerts in (
        ("opened", report.opened),
        ("joined", report.joined),
        ("fixed", report.fixed),
    ):
        for alert in alerts:
            say(out, f"{word} alert {alert}: {command('explain', str(alert))}")
    say(out, reports.headline(report))
