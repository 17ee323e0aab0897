"""External kernels on the command line: `--kernels-from` and `--project`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flexq_bench.cli.options import case_option, commits_option
from flexq_bench.errors import MissingResultsError, UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.workloads.patterns import select

if TYPE_CHECKING:
    from flexq_bench.ci.policy import Policy
    from flexq_bench.kernels.external.sources import KernelSource
    from flexq_bench.measure.ab import JudgedProject
    from flexq_bench.measure.external_kernels import Adopted
    from flexq_bench.measure.launcher import Launcher
    from flexq_bench.measure.worker_process import WorkerProcess
    from flexq_bench.repository.project import Project, ProjectRevision
    from flexq_bench.repository.project_builds import BuiltTree
    from flexq_bench.workloads.suite import Suite

    Launching = Callable[[BuiltTree], Launcher]

_STATE_MODULE = "flexq_bench.measure.external_kernels"
_UNBUILT = " (nothing was built: [build] in flexq-bench.toml says how, where kernels need it)"

KernelsFromOption = Annotated[
    list[str] | None,
    case_option(
        "--kernels-from",
        metavar="FILE.py|MODULE",
        help="Use external kernels of this file or module, named package.name; may be repeated.",
    ),
]
ProjectOption = Annotated[
    str | None,
    commits_option(
        "--project",
        metavar="PATH",
        help="Use the commits and kernels of another repository with a flexq-bench.toml.",
    ),
]


@dataclass(frozen=True)
class KernelSourceOptions:
    """Sources of external kernels: files and modules, or another repository."""

    kernels_from: KernelsFromOption = None
    project: ProjectOption = None

    def use_kernels(self, *, only: bool = False) -> None:
        """Register the kernels of --kernels-from. only: see use_kernels_from.

        Raises UsageError if both options are given.
        """
        if self.kernels_from and self.project is not None:
            raise UsageError(
                "--kernels-from and --project don't go together: leave one of them out"
            )
        use_kernels_from(self.kernels_from, only=only)


@dataclass(frozen=True)
class HistorySourceOptions(KernelSourceOptions):
    """The same for commands over commits, which may be older than the files that benchmark them."""

    project_file: Annotated[
        str | None,
        commits_option(
            "--project-file",
            metavar="REV|PATH",
            help="With --project: benchmark all commits with the project file and kernels of this "
            "revision, file or folder; --kernels-from then names other kernels.",
        ),
    ] = None

    def use_kernels(self, *, only: bool = False) -> None:
        if self.project is None:
            if self.project_file is not None:
                raise UsageError("--project-file is for another repository: add --project DIR")
            super().use_kernels(only=only)

    def open_project(
        self, revision: str = ".", *, builds: bool = True, launching: Launching | None = None
    ) -> OpenedProject:
        """Open the project at a revision, as `use_project`."""
        assert self.project is not None
        benchmarks = self._benchmarks()
        return use_project(
            self.project, revision, builds=builds, benchmarks=benchmarks, launching=launching
        )

    def _benchmarks(self) -> Project | None:
        """The project with files that are not each commit's own; None: they are."""
        from flexq_bench.repository.benchmark_files import project_with_benchmarks

        if self.project is None or (self.project_file is None and not self.kernels_from):
            return None
        return project_with_benchmarks(self.project, self.project_file, self.kernels_from)


@dataclass(frozen=True, slots=True)
class OpenedProject:
    """A project with the kernels of one revision registered. built: its files."""

    project: Project
    revision: ProjectRevision
    built: Path

    @property
    def measured(self) -> tuple[Project, ProjectRevision]:
        """The project and its revision that is measured."""
        return self.project, self.revision

    def suite(self, name: str | None = None) -> Suite:
        """Load a suite, named `project.suite`; None: the one in the project file.

        A built-in suite is used with the project's kernels.
        """
        from flexq_bench.workloads.suites import load_suite

        text = name or self.project.file.suite
        inside = self.built / text
        if text.endswith(".toml"):
            # A suite in the project file is read from the revision, not from the current folder.
            is_of_revision = name is None or inside.is_file()
            return self._with_project_name(load_suite(inside if is_of_revision else text))
        # On a cluster the labels are known when its workers are there.
        labels = adopted().all_labels or (f"{self.project.name}.*",)
        return self._with_project_name(load_suite(text).of(labels))

    def check_loaded(self) -> None:
        """Log the sources that failed to load. Raises MissingResultsError if all did."""
        from flexq_bench.measure import external_kernels

        known = external_kernels.adopted()
        if not known.labels:
            reason = next(iter(known.failures.values()), "none was loaded")
            build = self.project.file.build
            unbuilt = "" if build.command or build.packages else _UNBUILT
            raise MissingResultsError(
                f"{self.revision.commit.sha[:10]} has no kernels: {reason}{unbuilt}"
            )
        external_kernels.log_failures()

    def policy(self) -> Policy:
        """Return the policy in the project file, else one with the file's limit and owner."""
        from flexq_bench.ci.policy import Limit, Policy, read_policy

        file = self.project.file
        if not file.policy:
            limit = Limit(kernels=("*",), slower_percent=file.slower_percent, owner=file.owner)
            return Policy(self.project.name, self.suite(), limit)
        read = read_policy(self.built / file.policy)
        return replace(read, suite=self._with_project_name(read.suite))

    def _with_project_name(self, suite: Suite) -> Suite:
        return replace(suite, name=f"{self.project.name}.{suite.name}")


def use_project(
    folder: str,
    revision: str = ".",
    *,
    builds: bool = True,
    benchmarks: Project | None = None,
    launching: Launching | None = None,
) -> OpenedProject:
    """Build a revision of a project, and register its kernels and no others.

    The project file is that of the revision, or of `benchmarks`. builds: False for a cluster, whose
    nodes build it: it is only checked out here, and `check_loaded` follows when its workers are
    there. launching: gives the launcher that starts the processes of the build; None: each is a
    fresh one. Raises UsageError, WorkloadError and BuildError; MissingResultsError if none of its
    kernels loads.
    """
    from flexq_bench.repository import project as projects
    from flexq_bench.repository.project import BuildTable
    from flexq_bench.repository.project_builds import built_tree

    opened = benchmarks or projects.open_project(folder)
    project_revision = projects.revision(opened, revision)
    project = opened.at(project_revision.checkout)
    if not builds:
        from flexq_bench.measure import external_kernels

        external_kernels.forget()
        unbuilt = replace(project, file=project.file.model_copy(update={"build": BuildTable()}))
        checked_out = built_tree(unbuilt, project_revision.checkout)
        return OpenedProject(project, project_revision, checked_out.folder)
    built = built_tree(project, project_revision.checkout)
    launcher = None if launching is None else launching(built)
    # This imports torch, which takes as long as the imports of a server that starts above.
    from flexq_bench.measure import external_kernels

    external_kernels.forget()
    external_kernels.adopt(built.sources, environment=built.environment(), launcher=launcher)
    used = OpenedProject(project, project_revision, built.folder)
    used.check_loaded()
    return used


def use_judged_project(
    judged: JudgedProject, loaders: Mapping[KernelSource, WorkerProcess]
) -> OpenedProject:
    """Register the kernels of base, which its own sandbox loads, and no others.

    loaders: processes that were started for it. Raises MissingResultsError if none of them loads.
    """
    from flexq_bench.measure import external_kernels

    base = judged.sides[0]
    external_kernels.forget()
    external_kernels.adopt(
        judged.built[0].sources,
        environment=base.environment,
        launcher=base.launcher,
        loaders=loaders,
    )
    base.reset(keeps_caches=False)
    used = OpenedProject(judged.project, judged.revisions[0], judged.built[0].folder)
    used.check_loaded()
    return used


def use_kernels_from(texts: Sequence[str] | None, *, only: bool = False) -> None:
    """Register the kernels of these files and modules, and of no others.

    A source that can't be loaded is reported on stderr. Raises SourceError if a file or package
    doesn't exist; UsageError if `only`, which is for commands that need a source, is set and none
    can be loaded.
    """
    if not texts:
        # Otherwise there is no state, and importing the module would import torch.
        if _STATE_MODULE in sys.modules:
            from flexq_bench.measure import external_kernels

            external_kernels.forget()
        return
    from flexq_bench.kernels.external.sources import KernelSource
    from flexq_bench.measure import external_kernels

    external_kernels.forget()
    sources = [KernelSource.parse(text) for text in texts]
    for source in sources:
        source.check_exists()
    sources_adopted = external_kernels.adopt(sources)
    if only and not sources_adopted.labels:
        raise UsageError(next(iter(sources_adopted.failures.values())))
    external_kernels.log_failures()


def adopted() -> Adopted:
    """The sources of external kernels, loaded and failed."""
    from flexq_bench.measure import external_kernels

    return external_kernels.adopted()


def known_patterns(patterns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return labels and globs, without those of sources that failed to load; None: not given."""
    if patterns is None or _STATE_MODULE not in sys.modules:
        return None if patterns is None else tuple(patterns)
    from flexq_bench.measure import external_kernels

    return external_kernels.without_failed(patterns, adopted())


def sweep_patterns(patterns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the kernels of a sweep: those given, else those of `--kernels-from`; None: neither.

    Raises UsageError if all given kernels are of sources that failed to load.
    """
    loaded = known_patterns(patterns)
    if loaded is None and _STATE_MODULE in sys.modules:
        loaded = adopted().all_labels or None
    if loaded == ():
        raise UsageError("nothing to measure: no source in --kernels could be loaded")
    return loaded


def with_external(suite: Suite, patterns: Sequence[str] | None) -> Suite:
    """Add the kernels of `--kernels-from`, and installed packages' that match patterns."""
    from flexq_bench.kernels.registry import external_labels

    matching = select(tuple(patterns or ()), external_labels())
    return suite.adding(tuple(dict.fromkeys((*adopted().all_labels, *matching))))


def code_with_failures(code: int) -> int:
    """The exit code, at least MISSING if sources failed to load."""
    from flexq_bench.exit_codes import worst_exit_code

    return worst_exit_code((code, ExitCode.MISSING)) if failures_to_load() else code


def failures_to_load() -> list[str]:
    """Reasons of the sources of kernels that failed to load, a line each."""
    return list(adopted().failures.values()) if _STATE_MODULE in sys.modules else []
