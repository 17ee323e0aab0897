"""`flexq-bench compare`: two commits or two kernels, interleaved; or two stored runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flexq_bench.cli.cases import CaseOptions, layers_of_option
from flexq_bench.cli.comparison_progress import progress
from flexq_bench.cli.external import (
    HistorySourceOptions,
    code_with_failures,
    with_external,
)
from flexq_bench.cli.on_cluster import Comparing, cluster_comparer
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import (
    ClusterOptions,
    DbOption,
    InterleavingOptions,
    JsonFlag,
    RepositoryOption,
    SpendingOptions,
    case_option,
)
from flexq_bench.cli.output import console, plain, print_json, print_unbroken, say
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.queries import RunSummary
from flexq_bench.errors import UsageError
from flexq_bench.repository.provenance import commit_at, current_commit
from flexq_bench.repository.worktrees import repository_of, resolve_revision
from flexq_bench.runs.command_lines import command
from flexq_bench.sweeps.text import parse_sweep, split_sizes
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import is_probe
from flexq_bench.workloads.suite import Shape, Suite
from flexq_bench.workloads.suites import load_suite

if TYPE_CHECKING:
    from flexq_bench.kernels.contract import Backend, Capability
    from flexq_bench.measure.ab import InterleaveRules
    from flexq_bench.verdicts import CaseComparison


class Kind(StrEnum):
    AUTO = "auto"
    COMMITS = "commits"
    KERNELS = "kernels"
    RUNS = "runs"


@takes_option_groups
def compare(
    *,
    base: Annotated[str, typer.Argument(help="A revision, a kernel's label, or a run's uuid.")],
    head: Annotated[
        str, typer.Argument(help="The same kind as the first. A dot is the working tree.")
    ],
    kind: Annotated[
        Kind,
        typer.Option(help="Kind of the two. auto: kernels, else revisions, else stored runs."),
    ] = Kind.AUTO,
    suite: Annotated[
        str | None,
        case_option(
            metavar="SUITE",
            help="Suite of cases (list suites), or a .toml file. Default: smoke, or the project's.",
        ),
    ] = None,
    cases: CaseOptions,
    n: Annotated[
        str | None,
        case_option(metavar="RANGES", help="Output features of own shapes, not of a suite."),
    ] = None,
    k: Annotated[str | None, case_option(metavar="RANGES", help="Input features, as --n.")] = None,
    config: Annotated[
        str | None,
        case_option(
            metavar="PATH", help="The layers of a Hugging Face config.json, not of a suite."
        ),
    ] = None,
    sources: HistorySourceOptions,
    place: ClusterOptions,
    repository: RepositoryOption = ".",
    interleaving: InterleavingOptions,
    spending: SpendingOptions,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show which cases are slower in HEAD than in BASE.

    Two commits, or two kernels, are measured interleaved on one device: base, head, head, base,
    with fresh buffers and fresh processes. All results of HEAD are checked before anything is
    timed; a wrong one ends the comparison. With --cluster the devices of one kind share the cases.
    Of two stored runs only the stored times are compared.

    Exit code 0: none is slower; 1: one is slower or wrong; 3: one is ambiguous; 4: one has no data;
    5: this machine, a commit's worker or the database failed; 130: interrupted.
    """
    sources.use_kernels()
    own = _own_shapes(n, k, config, suite, cases)
    rules = spending.applied_to(interleaving.rules)
    if place.is_local:
        place.device_name()  # reports a missing device first
    if sources.project is not None:
        comparison = _of_project(sources, base, head, own or suite, cases, builds=place.is_local)
        code = _measure(comparison, place, interleaving, rules, db, as_json=as_json)
        raise typer.Exit(code_with_failures(code))
    if kind is Kind.AUTO:
        kind = _kind_of(base, head, repository, db)
    if kind is Kind.RUNS:
        raise typer.Exit(_compare_runs(base, head, db, as_json))
    if db is not None and place.is_local:
        raise UsageError("--db is for two stored runs: leave it out, a comparison stores nothing")
    measured = own or load_suite("smoke" if suite is None else suite)
    if kind is Kind.COMMITS:
        comparison = _of_commits(Path(repository), base, head, measured, cases)
    else:
        comparison = _of_kernels(base, head, measured, cases)
    code = _measure(comparison, place, interleaving, rules, db, as_json=as_json)
    raise typer.Exit(code_with_failures(code))


def _own_shapes(
    n: str | None, k: str | None, config: str | None, suite: str | None, options: CaseOptions
) -> Suite | None:
    """Return a suite of the shapes of --n and --k, or of --config; None: neither is given.

    Raises UsageError, WorkloadError.
    """
    if n is None and k is None and config is None:
        return None
    if suite is not None or options.models is not None:
        raise UsageError("--n, --k and --config bring their own shapes: drop --suite and --models")
    layers = (
        () if config is None else layers_of_option("compare", config, options.layers or "fused")
    )
    shapes = parse_sweep(
        kernels=options.kernels,
        m=split_sizes(options.m),
        n=split_sizes(n),
        k=split_sizes(k),
        stage=options.stage or "gemm",
        cache=options.cache or "cold",
        shapes=tuple(Shape(layer.n, layer.k, layer.name) for layer in layers),
    )
    return shapes.suite()


def _kind_of(base: str, head: str, repository: str, db: str | None) -> Kind:
    """Return the kind of both names. Raises UsageError if they are of different kinds."""
    from flexq_bench.kernels import registry

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

    try:
        with open_database(db, read_only=True) as database, database.session() as session:
            for prefix in (base, head):
                queries.run_by_uuid_prefix(session, prefix)
    except DatabaseError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Two commits or kernels to compare.

    base, head: as they were named. ends: what to check out, or the kernels. cases: called with a
    backend and the capability of its device. compare: on a device of this process; called with the
    cases, the device, the seed, the rules, and a function to call after each block. comparing: on a
    cluster.
    """

    kind: Kind
    base: str
    head: str
    ends: tuple[str, str]
    cases: Callable[[Backend, Capability | None], tuple[Case, ...]]
    compare: Callable[..., Iterable[CaseComparison]]
    comparing: Comparing

    @property
    def origin(self) -> str | None:
        """Of kernels that are not each commit's own: a revision or a path."""
        opened = self.comparing.opened
        files = None if opened is None else opened.project.benchmarks
        return None if files is None else files.origin


def _of_commits(
    repository: Path, base: str, head: str, suite: Suite, options: CaseOptions
) -> _Comparison:
    from flexq_bench.measure.ab import compare_commits
    from flexq_bench.measure.ab.revisions import resolve_pair

    tree = repository_of(repository)
    first, last = resolve_pair(tree, base, head)
    whole = options.restrict(with_external(suite, options.patterns))
    sha, dirty, _ = last.name.partition("-")
    return _Comparison(
        Kind.COMMITS,
        base,
        head,
        (first.commit, last.commit),
        partial(_cases, whole, kernels=options.patterns or ()),
        partial(compare_commits, repository, base, head),
        Comparing(
            "compare",
            replace(commit_at(tree, sha), dirty=dirty != ""),
            tree,
            names={first.commit: first.name, last.commit: last.name},
        ),
    )


def _of_project(
    sources: HistorySourceOptions,
    base: str,
    head: str,
    suite: Suite | str | None,
    options: CaseOptions,
    *,
    builds: bool,
) -> _Comparison:
    from flexq_bench.measure.ab import compare_project
    from flexq_bench.repository.project import revision

    opened = sources.open_project(base, builds=builds)
    whole = options.restrict(suite if isinstance(suite, Suite) else opened.suite(suite))
    first, last = opened.revision, revision(opened.project, head)
    return _Comparison(
        Kind.COMMITS,
        base,
        head,
        (first.checkout, last.checkout),
        partial(_cases, whole, kernels=options.patterns or ()),
        partial(compare_project, opened.project, first, last),
        Comparing(
            "compare",
            last.commit,
            opened.project.root,
            opened,
            names={first.checkout: first.name, last.checkout: last.name},
        ),
    )


def _of_kernels(base: str, head: str, suite: Suite, options: CaseOptions) -> _Comparison:
    """Compare two kernels on the shapes of a suite, independent of the suite's kernels."""
    from flexq_bench.measure.ab import compare_kernels

    if options.kernels is not None:
        raise UsageError("the kernels are BASE and HEAD: leave out --kernels")
    restricted = options.restrict(suite)

    def cases(backend: Backend, capability: Capability | None) -> tuple[Case, ...]:
        def cases_of(label: str) -> tuple[Case, ...]:
            groups = tuple(
                replace(group, kernels=(label,))
                for group in restricted.groups
                if not all(map(is_probe, group.kernels))
            )
            of_label = replace(restricted, groups=groups)
            return _cases(of_label, backend, capability, kernels=(label,))

        cases_of(head)  # raises UsageError if the backend doesn't have it
        return cases_of(base)

    return _Comparison(
        Kind.KERNELS,
        base,
        head,
        (base, head),
        cases,
        partial(compare_kernels, base, head),
        Comparing("compare", current_commit(), Path()),
    )


def _cases(
    suite: Suite, backend: Backend, capability: Capability | None, *, kernels: Sequence[str]
) -> tuple[Case, ...]:
    """Return the suite's cases on a device; probes only if kernels, labels or globs, are given."""
    from flexq_bench.runs.plan import build_plan

    plan = build_plan(suite, backend, capability, requested_kernels=kernels)
    labels = list(dict.fromkeys(case.label for case in plan.cases))
    # Without the probes that a plan adds: comparisons don't need them.
    planned = set(plan.cases)
    cases = tuple(
        case
        for case in suite.cases(labels)
        if case in planned and (kernels or not is_probe(case.kernel))
    )
    if not cases:
        raise UsageError(
            f"nothing to compare: all remaining cases of suite {suite.name} are probes"
        )
    return cases


def _measure(
    comparison: _Comparison,
    place: ClusterOptions,
    interleaving: InterleavingOptions,
    rules: InterleaveRules,
    db: str | None,
    *,
    as_json: bool,
) -> int:
    """Measure and print a comparison; returns the exit code."""
    from flexq_bench.measure.device import capability, find_device

    if not place.is_local:
        with (
            open_database(db) as database,
            progress() as on_progress,
            cluster_comparer(database, place, interleaving.seed, comparison.comparing) as cluster,
        ):
            kind = cluster.kind
            cases = comparison.cases(kind.backend, kind.capability)
            results = list(
                cluster.compare(
                    *comparison.ends,
                    cases,
                    kernels=comparison.kind is Kind.KERNELS,
                    rules=rules,
                    on_progress=on_progress,
                )
            )
        return _show(comparison, cases, kind.gpu, results, rules, as_json=as_json)
    device = place.device_name()
    torch_device = find_device(device)
    backend: Backend = "cpu" if torch_device.type == "cpu" else "cuda"
    cases = comparison.cases(backend, capability(torch_device))
    with progress() as on_progress:
        results = list(
            comparison.compare(
                cases, device=device, seed=interleaving.seed, rules=rules, on_progress=on_progress
            )
        )
    return _show(comparison, cases, device, results, rules, as_json=as_json)


def _show(
    comparison: _Comparison,
    cases: Sequence[Case],
    device: str,
    results: Sequence[CaseComparison],
    rules: InterleaveRules,
    *,
    as_json: bool,
) -> int:
    from flexq_bench.measure.ab import confirm_comparisons
    from flexq_bench.results import comparison_report as report

    position = {case: i for i, case in enumerate(cases)}
    confirmed = confirm_comparisons(
        sorted(results, key=lambda result: position[result.case]), rules
    )
    verdicts = [result.confirmation.verdict for result in confirmed]
    code = int(report.exit_code_of_verdicts(verdicts))
    document = {
        "kind": comparison.kind,
        "base": confirmed[0].base,
        "head": confirmed[0].head,
        "device": device,
        "rules": plain(rules),
        "exit_code": code,
        **({} if comparison.origin is None else {"benchmarks_from": comparison.origin}),
        "cases": [report.as_plain(result) for result in confirmed],
    }
    sides = f"{comparison.head} against {comparison.base}, interleaved on {device}"
    lines = [
        *(
            []
            if comparison.origin is None
            else [f"kernels of {comparison.origin}, at both commits"]
        ),
        *report.problem_lines(confirmed),
        *report.undecided_lines(confirmed),
        f"{sides}: {report.counts_line(verdicts)}",
    ]
    _print(document, report.comparison_table(confirmed), lines, as_json=as_json)
    return code


def _print(
    document: Mapping[str, Any], table: Table, lines: Sequence[str], *, as_json: bool
) -> None:
    """Print a comparison: as JSON, or as a table followed by lines."""
    if as_json:
        print_json(document)
        return
    out = console()
    print_unbroken(out, table)
    for line in lines:
        say(out, line)


def _compare_runs(base: str, head: str, db: str | None, as_json: bool) -> int:
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
    code = int(report.exit_code_of_verdicts(verdicts))
    document = {
        "kind": "runs",
        "interleaved": False,
        "base": runs[0].uuid,
        "head": runs[1].uuid,
        "exit_code": code,
        "cases": [report.stored_as_plain(result) for result in results],
    }
    first, second = (run.uuid[:8] for run in runs)
    lines = [
        *report.problem_lines(results),
        f"run {second} against {first}: {report.counts_line(verdicts)}",
        "the runs were measured separately, so the machine may cause differences; "
        + _interleaved_advice(runs),
    ]
    _print(document, report.stored_table(results), lines, as_json=as_json)
    return code


def _interleaved_advice(runs: Sequence[RunSummary]) -> str:
    from flexq_bench.workloads.suites import list_suites

    commits, suites = ({getattr(run, name) for run in runs} for name in ("commit", "suite"))
    if len(commits) == 1 and len({run.dirty for run in runs}) == 1:
        return "both are of one commit: it is not the code"
    common_suites = [name for name in suites if len(suites) == 1 and name in list_suites()]
    suite = ("--suite", *common_suites) if common_suites else ()
    arguments = ("compare", *(run.commit[:10] for run in runs), *suite)
    return f"to be sure: {command(*arguments)}"
