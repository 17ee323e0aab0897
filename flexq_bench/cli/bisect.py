"""`flexq-bench bisect`: the commits between two revisions that changed series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexq_bench.cli.comparison_progress import search_progress
from flexq_bench.cli.external import HistorySourceOptions, OpenedProject
from flexq_bench.cli.on_cluster import Comparing, cluster_comparer
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import (
    BackendChoice,
    ClusterOptions,
    DbOption,
    InterleavingOptions,
    JsonFlag,
    RepositoryOption,
)
from flexq_bench.cli.output import console, print_json, say, say_interrupted
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import worst_exit_code
from flexq_bench.repository.provenance import commit_at
from flexq_bench.repository.worktrees import commits_after, repository_of
from flexq_bench.workloads.case import SERVING, Case, kernel_label, stored_case, workload_of

if TYPE_CHECKING:
    # A server of a search imports as long as this process, so it starts before this imports these.
    from flexq_bench.ci.bisect import BisectionStep, Search
    from flexq_bench.measure.ab import InterleaveRules, Suffices
    from flexq_bench.measure.launcher import Launcher
    from flexq_bench.repository.project import Project
    from flexq_bench.repository.project_builds import BuiltTree
    from flexq_bench.verdicts import CaseComparison


@takes_option_groups
def bisect(
    *,
    series: Annotated[
        list[str],
        typer.Argument(help="Ids of series (list series), or cases: 'empty gemm cold m1n1k1'."),
    ],
    good: Annotated[str, typer.Option(metavar="REV", help="Revision before the change.")],
    bad: Annotated[str, typer.Option(metavar="REV", help="Revision with the change.")],
    place: ClusterOptions,
    repository: RepositoryOption = ".",
    sources: HistorySourceOptions,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Repeat the comparisons of an interrupted search.")
    ] = False,
    interleaving: InterleavingOptions,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the commit that made a series slower or faster, by interleaved comparisons with GOOD.

    Several series share comparisons of the same commit.

    Commits that don't build, whose worker fails, or whose result is ambiguous are skipped and
    reported. Of merges the search follows the first parents; if a merge made the change, a command
    searches what it merged. An interrupted search is resumed when it is started again.

    Exit code 0: no regression (BAD is not slower); 1: the commit that made it slower was found; 3:
    it is one of several, or GOOD and BAD can't be told apart; 4: BAD or GOOD has no data; 130:
    interrupted.
    """
    out = console(stderr=as_json)
    try:
        with ExitStack() as stack:
            searched = _searched(stack, series, good, bad, place, repository, sources, db)
            from flexq_bench.ci.bisect import Journal, search_case
            from flexq_bench.ci.bisect import bisect as find_changes
            from flexq_bench.ci.reports import bisect as reports

            cases, commits = searched.cases, searched.commits
            rules, seed = interleaving.rules, interleaving.seed
            processes = rules.processes if place.is_local else 1
            shown = stack.enter_context(search_progress(len(commits), processes))
            searching = stack.enter_context(
                _opened_place(place, seed, searched, db)
                if searched.engines is None
                else _place_of_engines(place, seed, searched.engines, searched.gpu)
            )

            def compare(
                commit: str, asked: Mapping[Case, Suffices | None]
            ) -> Sequence[CaseComparison]:
                return list(
                    searching.compare(
                        searched.good,
                        commit,
                        list(asked),
                        on_progress=shown.of_commit(commit),
                        rules=replace(rules, suffices=partial(_suffices, asked)),
                    )
                )

            def resumed(count: int) -> None:
                shown.skip(count)
                say(out, f"resuming with {count} results of an interrupted search")

            def step_made(case: Case, step: BisectionStep) -> None:
                say(out, f"{case.key}: " * (len(cases) > 1) + reports.step_line(step))

            ends = searched.good, searched.bad
            journals = {
                case: Journal(case.key, *ends, searching.device, seed, rules) for case in cases
            }

            def search(case: Case) -> Search:
                if fresh:
                    journals[case].delete()
                return search_case(
                    case,
                    searched.good,
                    commits,
                    journals[case],
                    on_step=partial(step_made, case),
                    on_resume=resumed,
                    prepare=searching.prepare,
                )

            found = find_changes({case: search(case) for case in cases}, compare)
            for journal in journals.values():
                journal.delete()
    except KeyboardInterrupt:
        raise typer.Exit(say_interrupted("the same command")) from None
    if as_json:
        plain = [reports.as_plain(found[case], searched.folder) for case in cases]
        print_json(plain if len(plain) > 1 else plain[0])
    else:
        same = _options(
            project=sources.project,
            project_file=sources.project_file,
            kernels_from=sources.kernels_from,
            repository=None if repository == "." else repository,
            backend=None if place.backend is BackendChoice.AUTO else place.backend.value,
            device=place.device,
            cluster=None if place.is_local else place.cluster,
            gpus=place.gpus,
            db=db,
        )
        for case in cases:
            if len(cases) > 1:
                say(out, f"{case.key}:")
            for line in reports.lines(found[case], searched.folder, same):
                say(out, line)
    raise typer.Exit(worst_exit_code(report.exit_code for report in found.values()))


def case_of_series(series: str, db: str | None) -> tuple[Case, str | None]:
    """Return the case and the GPU of a stored series, or of a case's key (GPU None: any).

    Raises UsageError if there is no such series, WorkloadError if the key is malformed, and
    errors of opening the database `db`.
    """
    if not series.isdecimal():
        return Case.from_key(series), None
    with open_database(db, read_only=True) as database, database.session() as session:
        rows = [row for row in queries.list_series(session) if row.id == int(series)]
    if not rows:
        raise UsageError(f"no series {series}: flexq-bench list series shows those there are")
    (row,) = rows
    label = kernel_label(row.kernel, row.variant)
    if row.operation == SERVING:
        workload = workload_of(SERVING, f"{row.parameters} metric={row.metric}")
        return Case(row.kernel, workload, stage="op", cache="hot"), row.gpu
    key = stored_case(label, row.stage, row.cache, row.operation, row.parameters)
    return Case.from_key(key), row.gpu


@dataclass(frozen=True, slots=True)
class _Searched:
    """Cases to search, and the commits after good up to bad, oldest first.

    folder: of the repository. opened: the project of the commits, and launcher of the processes
    that compare them, if they are on this machine; engines: the project of engines; all None: this
    repository. gpu: the kind of device; None: any.
    """

    cases: Sequence[Case]
    folder: Path
    good: str
    bad: str
    commits: Sequence[str]
    opened: OpenedProject | None
    launcher: Launcher | None
    engines: Project | None
    gpu: str | None


def _searched(
    stack: ExitStack,
    series: Sequence[str],
    good: str,
    bad: str,
    place: ClusterOptions,
    repository: str,
    sources: HistorySourceOptions,
    db: str | None,
) -> _Searched:
    """Resolve the arguments. Raises UsageError if there is nothing to search, and others.

    stack: ends the launcher.
    """
    from flexq_bench.repository import project as projects

    gpu_of = dict(case_of_series(text, db) for text in series)
    kinds = {gpu for gpu in gpu_of.values() if gpu is not None}
    serves = any(case.operation == SERVING for case in gpu_of)
    if len(kinds) > 1 or (serves and len(gpu_of) > 1):
        raise UsageError("series of several GPUs, or of engines, are searched one by one")
    opened: OpenedProject | None = None
    launcher: Launcher | None = None
    engines: Project | None = None
    if serves:
        if sources.project is None:
            raise UsageError("the speed of engines is of a project's commits: add --project DIR")
        engines = projects.open_project(sources.project)
        folder = engines.root
        first, last = (projects.revision(engines, rev).commit.sha for rev in (good, bad))
        commits = commits_after(folder, first, last)
    elif sources.project is not None:
        sources.use_kernels()

        def launching(built: BuiltTree) -> Launcher:
            nonlocal launcher
            launcher = stack.enter_context(_server_of(built))
            return launcher

        opened = sources.open_project(good, builds=place.is_local, launching=launching)
        folder, first = opened.project.root, opened.revision.commit.sha
        last = projects.revision(opened.project, bad).commit.sha
        commits = commits_after(folder, first, last)
    else:
        from flexq_bench.measure.ab.revisions import commits_between, resolve_pair

        sources.use_kernels()
        folder = repository_of(Path(repository))
        first, last = (revision.commit for revision in resolve_pair(folder, good, bad))
        commits = commits_between(folder, first, last)
    if not commits:
        raise UsageError(f"no commit between {good} and {bad} changes the code: nothing to search")
    if opened is not None and opened.project.benchmarks is not None:
        origin = opened.project.benchmarks.origin
        say(console(stderr=True), f"kernels of {origin}, at every commit")
    gpu = next(iter(kinds), None)
    return _Searched(list(gpu_of), folder, first, last, commits, opened, launcher, engines, gpu)


@contextmanager
def _server_of(built: BuiltTree) -> Iterator[Launcher]:
    """The launcher of all comparisons in a project, which starts before this process imports torch.

    built: any of its commits, whose sandbox reads the builds of all.
    """
    from flexq_bench.measure.launcher import forking_launcher
    from flexq_bench.measure.program import WORKER, program_root, sandbox_of
    from flexq_bench.measure.worker_process import variables_in
    from flexq_bench.repository.project_builds import folder_of_builds

    environment, program = built.environment(), program_root()
    wrap = sandbox_of(built.sources, environment, [folder_of_builds()]).wrap
    begin = WORKER, variables_in(program, environment)
    with forking_launcher(program, wrap, begin=begin) as launcher:
        yield launcher


def _suffices(
    asked: Mapping[Case, Suffices | None], compared: CaseComparison, decided: bool
) -> bool:
    suffices = asked[compared.case]
    return decided if suffices is None else suffices(compared, decided)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of comparisons: a device of this process, or those of a kind of a cluster.

    device: its uuid, or the kind. prepare: as in flexq_bench.ci.bisect.
    """

    device: str
    compare: Callable[..., Iterable[CaseComparison]]
    prepare: Callable[[Sequence[str]], None]


@contextmanager
def _place_of_engines(
    place: ClusterOptions, seed: int, project: Project, gpu: str | None
) -> Iterator[_Place]:
    """The place of comparisons of the engines of a project's commits: this machine."""
    from flexq_bench.ci.bisect import device_uuid
    from flexq_bench.served.speed.commits import compare_engines

    if not place.is_local:
        raise UsageError("engines are compared on this machine: leave out --cluster")
    name = place.device_name()
    gpus = () if name == "cpu" else (name.partition(":")[2] or "0",)

    def compare(
        base: str, head: str, cases: Sequence[Case], *, rules: InterleaveRules, **_: Any
    ) -> list[CaseComparison]:
        return [
            compare_engines(project, base, head, case, gpus=gpus, seed=seed, rules=rules)
            for case in cases
        ]

    yield _Place(device_uuid(name, gpu), compare, lambda commits: None)


@contextmanager
def _opened_place(
    place: ClusterOptions, seed: int, searched: _Searched, db: str | None
) -> Iterator[_Place]:
    opened, folder = searched.opened, searched.folder
    if not place.is_local:
        newest = replace(
            commit_at(folder, searched.bad),
            project="" if opened is None else opened.project.name,
        )
        comparing = Comparing("bisect", newest, folder, opened, gpu=searched.gpu)
        with (
            open_database(db) as database,
            cluster_comparer(database, place, seed, comparing) as cluster,
        ):
            yield _Place(cluster.kind.gpu, cluster.compare, lambda commits: None)
        return
    from flexq_bench.ci.bisect import device_uuid
    from flexq_bench.measure.ab import compare_commits
    from flexq_bench.measure.ab.worker_pairs import can_start_beside
    from flexq_bench.measure.launcher import OWN_LIBRARIES, forking_launcher

    name = place.device_name()
    uuid = device_uuid(name, searched.gpu)
    build = None
    compare: Callable[..., Iterable[CaseComparison]]
    with ExitStack() as stack:
        if opened is not None:
            compare = partial(_compared_in_project, opened.project)
            launcher = searched.launcher
            build = partial(_build, opened.project) if can_start_beside(name) else None
        else:  # the commits of this program need no build, and each has its own program
            compare = partial(compare_commits, folder)
            launcher = stack.enter_context(forking_launcher(libraries=OWN_LIBRARIES))
        prepare = stack.enter_context(built_ahead(build))
        measure = partial(compare, device=name, seed=seed, launcher=launcher)
        yield _Place(uuid, measure, prepare)


def _options(**values: str | Sequence[str] | None) -> list[str]:
    """Options with values, for a command that goes on in the same way."""
    return [
        part
        for name, value in values.items()
        for text in ((value,) if isinstance(value, str) else value or ())
        if text
        for part in (f"--{name.replace('_', '-')}", text)
    ]


@contextmanager
def built_ahead(
    build: Callable[[str], object] | None,
) -> Iterator[Callable[[Sequence[str]], None]]:
    """A function that builds commits in the background; None: none needs or may be built there.

    Failures are ignored: the comparison of such a commit builds it again, and reports them.
    """
    if build is None:
        yield lambda _commits: None
        return
    threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="builds")

    def start(commits: Sequence[str]) -> None:
        for commit in commits:
            threads.submit(build, commit)

    try:
        yield start
    finally:
        threads.shutdown(cancel_futures=True)


def _build(project: Project, commit: str) -> None:
    from flexq_bench.repository.project_builds import built_tree

    built_tree(project.at(commit), commit)


def _compared_in_project(
    project: Project, base: str, head: str, cases: Sequence[Case], **how: Any
) -> Iterator[CaseComparison]:
    from flexq_bench.measure.ab import compare_project
    from flexq_bench.repository.project import revision

    ends = (revision(project, base), revision(project, head))
    return compare_project(project, *ends, cases, **how)
