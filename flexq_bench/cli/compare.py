"""`flexq-bench compare`: two commits or two kernels, interleaved; or two stored runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexq_bench.cli.options import (
    CASES,
    BackendChoice,
    BackendOption,
    CacheOption,
    DbOption,
    DeviceOption,
    JsonFlag,
    KernelsFromOption,
    KernelsOption,
    LayersOption,
    ModelsOption,
    ProcessesOption,
    ProjectOption,
    RepositoryOption,
    SeedOption,
    SizesOption,
    StageOption,
    restrictions_of,
)
from flexq_bench.errors import UsageError
from flexq_bench.runs.command_lines import command
from flexq_bench.sweeps.text import split_sizes

if TYPE_CHECKING:
    from flexq_bench.cli.case_selection import CaseSelection
    from flexq_bench.db.queries import RunSummary
    from flexq_bench.measure.ab import Block, InterleaveRules
    from flexq_bench.verdicts import CaseComparison
    from flexq_bench.workloads.case import Case


class Kind(StrEnum):
    AUTO = "auto"
    COMMITS = "commits"
    KERNELS = "kernels"
    RUNS = "runs"


def compare(
    base: Annotated[str, typer.Argument(help="A revision, a kernel's label, or a run's uuid.")],
    head: Annotated[
        str, typer.Argument(help="The same kind as the first. A dot is the working tree.")
    ],
    kind: Annotated[
        Kind,
        typer.Option(
            "--kind", help="Kind of the two. auto: kernels, else revisions, else stored runs."
        ),
    ] = Kind.AUTO,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            metavar="SUITE",
            help="Suite of cases (list suites), or a .toml file. Default: smoke, or the project's.",
            rich_help_panel=CASES,
        ),
    ] = None,
    models: ModelsOption = None,
    m: SizesOption = None,
    kernels: KernelsOption = None,
    kernels_from: KernelsFromOption = None,
    project: ProjectOption = None,
    layers: LayersOption = None,
    stage: StageOption = None,
    cache: CacheOption = None,
    backend: BackendOption = BackendChoice.AUTO,
    device: DeviceOption = None,
    processes: ProcessesOption = 6,
    repository: RepositoryOption = ".",
    seed: SeedOption = 0,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show which cases are slower in HEAD than in BASE.

    Two commits, or two kernels, are measured interleaved on one device: base, head, head, base,
    with fresh buffers and fresh processes. Of two stored runs only the stored times are compared.

    Exit code 0: none is slower; 1: one is slower or wrong; 3: one is ambiguous; 4: one has no data;
    5: this machine, a commit's worker or the database failed; 130: interrupted.
    """
    from flexq_bench.cli.case_selection import CaseSelection
    from flexq_bench.cli.external import code_with_failures, known_patterns, use_kernels_from
    from flexq_bench.cli.project import refuse_beside_project

    use_kernels_from(kernels_from)
    restrictions = restrictions_of(
        models=models, layers=layers, kernels=kernels, stage=stage, cache=cache
    )
    restrictions["kernels"] = known_patterns(restrictions["kernels"])
    selection = CaseSelection("smoke" if suite is None else suite, split_sizes(m), restrictions)
    if project is not None:
        refuse_beside_project(kernels_from=kernels_from)
        selection = replace(selection, suite=suite or "")
        where = (backend, device)
        raise typer.Exit(_project(project, base, head, selection, where, processes, seed, as_json))
    if kind is Kind.AUTO:
        kind = _kind_of(base, head, repository, db)
    if kind is Kind.RUNS:
        raise typer.Exit(_compare_runs(base, head, db, as_json))
    if db is not None:
        raise UsageError("--db is for two stored runs: leave it out, a comparison stores nothing")
    from flexq_bench.measure.ab import InterleaveRules

    rules = InterleaveRules.with_processes(processes)
    compared = _commits if kind is Kind.COMMITS else _kernels
    code = compared(
        base, head, selection, (backend, device), Path(repository), rules, seed, as_json
    )
    raise typer.Exit(code_with_failures(code))


def _kind_of(base: str, head: str, repository: str, db: str | None) -> Kind:
    """Return the kind of both names. Raises UsageError if they are of different kinds."""
    from flexq_bench.kernels import registry
    from flexq_bench.repository.worktrees import repository_of, resolve_revision

    labels = {*registry.labels("cpu"), *registry.labels("cuda")}
    if base in labels and head in labels:
        return Kind.KERNELS
    for name, other_name in ((base, head), (head, base)):
        if name in labels:
            raise UsageError(f"{name} is a kernel and {other_name} is none: compare like with like")
    try:
        tree = repository_of(Path(repository))
        for name in (base, head):
            if name != ".":
                resolve_revision(tree, name)
    except UsageError as error:
        if _are_runs(base, head, db):
            return Kind.RUNS
        raise UsageError(f"{error} (nor are they two kernels, or two stored runs)") from None
    return Kind.COMMITS


def _are_runs(base: str, head: str, db: str | None) -> bool:
    from flexq_bench.db import queries
    from flexq_bench.db.engine import open_database
    from flexq_bench.db.errors import DatabaseError

    try:
        with open_database(db, read_only=True) as database, database.session() as session:
            for prefix in (base, head):
                queries.run_by_uuid_prefix(session, prefix)
    except DatabaseError:
        return False
    return True


def _commits(
    base: str,
    head: str,
    selection: Any,
    where: tuple[BackendChoice, str | None],
    repository: Path,
    rules: InterleaveRules,
    seed: int,
    as_json: bool,
) -> int:
    from flexq_bench.cli.case_selection import chosen_cases, chosen_device
    from flexq_bench.measure.ab import compare_commits
    from flexq_bench.measure.ab.revisions import resolve_pair
    from flexq_bench.repository.worktrees import repository_of

    resolve_pair(repository_of(repository), base, head)  # reports unknown revisions first
    device = chosen_device(*where)
    cases = chosen_cases(selection, device)
    with progress(len(cases) * rules.blocks_at_first) as on_block:
        results = list(
            compare_commits(
                repository,
                base,
                head,
                cases,
                device=device,
                seed=seed,
                rules=rules,
                on_block=on_block,
            )
        )
    return _show("commits", base, head, cases, results, rules, device, as_json)


def _project(
    folder: str,
    base: str,
    head: str,
    selection: CaseSelection,
    where: tuple[BackendChoice, str | None],
    processes: int,
    seed: int,
    as_json: bool,
) -> int:
    from flexq_bench.cli.case_selection import cases_of_suite, chosen_device
    from flexq_bench.cli.project import use_project
    from flexq_bench.measure.ab import InterleaveRules, compare_project
    from flexq_bench.repository.project import revision

    device = chosen_device(*where)
    opened = use_project(folder, base)
    cases = cases_of_suite(opened.suite(selection.suite or None), selection, device)
    rules = InterleaveRules.with_processes(processes)
    ends = (opened.revision, revision(opened.project, head))
    with progress(len(cases) * rules.blocks_at_first) as on_block:
        compared = compare_project(
            opened.project, *ends, cases, device=device, seed=seed, rules=rules, on_block=on_block
        )
        results = list(compared)
    return _show("commits", base, head, cases, results, rules, device, as_json)


def _kernels(
    base: str,
    head: str,
    selection: Any,
    where: tuple[BackendChoice, str | None],
    _repository: Path,
    rules: InterleaveRules,
    seed: int,
    as_json: bool,
) -> int:
    from flexq_bench.cli.case_selection import chosen_device, chosen_shapes
    from flexq_bench.measure.ab import compare_kernels

    device = chosen_device(*where)
    chosen_shapes(selection, head, device)  # raises UsageError if the backend doesn't have it
    cases = chosen_shapes(selection, base, device)
    with progress(len(cases) * rules.blocks_at_first) as on_block:
        results = list(
            compare_kernels(
                base, head, cases, device=device, seed=seed, rules=rules, on_block=on_block
            )
        )
    return _show("kernels", base, head, cases, results, rules, device, as_json)


def _show(
    kind: str,
    base: str,
    head: str,
    cases: Sequence[Case],
    results: Sequence[CaseComparison],
    rules: InterleaveRules,
    device: str,
    as_json: bool,
) -> int:
    from flexq_bench.cli.output import console, plain, print_json, print_unbroken, say
    from flexq_bench.measure.ab import confirm_comparisons
    from flexq_bench.results import comparison_report as report

    position = {case: i for i, case in enumerate(cases)}
    night = confirm_comparisons(sorted(results, key=lambda result: position[result.case]), rules)
    verdicts = [result.confirmation.verdict for result in night]
    code = report.exit_code_of_verdicts(verdicts)
    if as_json:
        print_json(
            {
                "kind": kind,
                "base": night[0].base,
                "head": night[0].head,
                "device": device,
                "rules": plain(rules),
                "exit_code": int(code),
                "cases": [report.as_plain(result) for result in night],
            }
        )
        return int(code)
    out = console()
    print_unbroken(out, report.comparison_table(night))
    for line in report.problem_lines(night):
        say(out, line)
    say(out, f"{head} against {base}, interleaved on {device}: {report.counts_line(verdicts)}")
    return int(code)


def _compare_runs(base: str, head: str, db: str | None, as_json: bool) -> int:
    from flexq_bench.cli.output import console, print_json, print_unbroken, say
    from flexq_bench.db import queries
    from flexq_bench.db.engine import open_database
    from flexq_bench.results import comparison_report as report
    from flexq_bench.results.stored_comparison import compare_stored
    from flexq_bench.results.stored_noise import read_noise

    with open_database(db, read_only=True) as database, database.session() as session:
        runs = [queries.run_by_uuid_prefix(session, prefix) for prefix in (base, head)]
        stored = [queries.run_results(session, run.uuid) for run in runs]
        noise = read_noise(session, {row.series_id for rows in stored for row in rows})
    protocols = [{row.protocol_version for row in rows} for rows in stored]
    if all(protocols) and not protocols[0] & protocols[1]:
        first, second = (", ".join(map(str, sorted(versions))) for versions in protocols)
        raise UsageError(
            f"run {base} was measured by protocol {first} and {head} by {second}: their times "
            "are not comparable: measure one of them again"
        )
    results = compare_stored(stored[0], stored[1], noise)
    if not results:
        raise UsageError(f"neither run has a result: see {base} and {head} in list runs")
    verdicts = [result.verdict for result in results]
    code = report.exit_code_of_verdicts(verdicts)
    if as_json:
        print_json(
            {
                "kind": "runs",
                "interleaved": False,
                "base": runs[0].uuid,
                "head": runs[1].uuid,
                "exit_code": int(code),
                "cases": [report.stored_as_plain(result) for result in results],
            }
        )
        return int(code)
    out = console()
    print_unbroken(out, report.stored_table(results))
    for line in report.problem_lines(results):
        say(out, line)
    first, second = (run.uuid[:8] for run in runs)
    say(out, f"run {second} against {first}: {report.counts_line(verdicts)}")
    say(
        out,
        "the runs were measured separately, so the machine may cause differences; "
        + _interleaved_advice(runs),
    )
    return int(code)


def _interleaved_advice(runs: Sequence[RunSummary]) -> str:
    from flexq_bench.workloads.suites import list_suites

    commits, suites = ({getattr(run, name) for run in runs} for name in ("commit", "suite"))
    if len(commits) == 1 and len({run.dirty for run in runs}) == 1:
        return "both are of one commit: it is not the code"
    common_suites = [name for name in suites if len(suites) == 1 and name in list_suites()]
    suite = ("--suite", *common_suites) if common_suites else ()
    arguments = ("compare", *(run.commit[:10] for run in runs), *suite)
    return f"to be sure: {command(*arguments)}"


@contextmanager
def progress(total: int) -> Iterator[Callable[[Case, Block], None]]:
    """Show measured blocks; within the context SIGTERM raises KeyboardInterrupt."""
    from flexq_bench.cli.progress import progress as shown_progress
    from flexq_bench.interrupts import ended_by_terminate

    with ended_by_terminate(), shown_progress("comparing", total) as bar:
        # Ambiguous cases are measured again, which exceeds the total.
        yield lambda case, _block: bar.advance(case.key)
