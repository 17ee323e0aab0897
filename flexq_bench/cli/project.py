"""`--project`: kernels and commits of another repository."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexq_bench.errors import UsageError
from flexq_bench.workloads.suite import Suite

if TYPE_CHECKING:
    from flexq_bench.ci.policy import Policy
    from flexq_bench.repository.project import Project, ProjectRevision

_UNBUILT = " (nothing was built: [build] in flexq-bench.toml says how, where kernels need it)"


@dataclass(frozen=True, slots=True)
class OpenedProject:
    """A project with the kernels of one revision registered. built: its files."""

    project: Project
    revision: ProjectRevision
    built: Path

    def suite(self, name: str | None = None) -> Suite:
        """Load a suite, named `project.suite`; None: the one in the project file.

        A built-in suite is used with the project's kernels.
        """
        from flexq_bench.cli.external import adopted
        from flexq_bench.workloads.suites import load_suite

        text = name or self.project.file.suite
        inside = self.built / text
        if text.endswith(".toml"):
            # A suite in the project file is read from the revision, not from the current folder.
            is_of_revision = name is None or inside.is_file()
            return self._with_project_name(load_suite(inside if is_of_revision else text))
        return self._with_project_name(load_suite(text).of(adopted().all_labels))

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


def use_project(folder: str, revision: str = ".") -> OpenedProject:
    """Build a revision of a project, and register its kernels and no others.

    The project file is that of the revision. Raises UsageError, WorkloadError and BuildError;
    MissingResultsError if none of its kernels loads.
    """
    from flexq_bench.errors import MissingResultsError
    from flexq_bench.measure import external_kernels
    from flexq_bench.repository import project as projects
    from flexq_bench.repository.project_builds import built_tree

    opened = projects.open_project(folder)
    built_at = projects.revision(opened, revision)
    at = opened.at(built_at.checkout)
    built = built_tree(at, built_at.checkout)
    external_kernels.forget()
    known = external_kernels.adopt(built.sources, environment=built.environment())
    if not known.labels:
        reason = next(iter(known.failures.values()))
        build = at.file.build
        unbuilt = "" if build.command or build.packages else _UNBUILT
        raise MissingResultsError(f"{built_at.commit.sha[:10]} has no kernels: {reason}{unbuilt}")
    external_kernels.log_failures()
    return OpenedProject(at, built_at, built.folder)


def refuse_beside_project(**options: Any) -> None:
    """Raise UsageError for options that have no meaning with --project."""
    for name, value in options.items():
        if value:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} and --project don't go together: leave one of them out")
