"""External kernels on nodes that have none of their files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexq_bench.fleet.node_program import Parcel
from flexq_bench.fleet.shipped_repository import ShippedRepository, shipped
from flexq_bench.fleet.shipping import packed_files, parcel
from flexq_bench.fleet.timeouts import Times
from flexq_bench.kernels.external.source_files import files_of_source
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.kernels.runtime.files import cache_folder
from flexq_bench.measure.external_kernels import Adopted, adopt
from flexq_bench.repository.project import Project, ProjectRevision
from flexq_bench.repository.project_builds import built_tree


@dataclass(frozen=True, slots=True)
class ShippedSource:
    """A source of kernels. place: of its file in the parcel, or the module's name."""

    place: str
    package: str
    is_file: bool
    parcel: Parcel


@dataclass(frozen=True, slots=True)
class ShippedKernels:
    """Sources of kernels, or a project's commit, which each node builds or gets built.

    repository: with the commit `revision`; None: there are only sources. start_s, case_s: limits of
    the processes that run the kernels.
    """

    sources: tuple[ShippedSource, ...] = ()
    repository: ShippedRepository | None = None
    revision: str = ""
    start_s: float = 0.0
    case_s: float = 0.0

    def adopt(self) -> Adopted:
        """Register the kernels in this process, on a node; a process of its own describes them.

        Raises BuildError if the commit does not build on this node, and what unpacking it raises.
        """
        if self.repository is not None:
            project = self.repository.project_here()
            built = built_tree(project, self.repository.checkouts[self.revision])
            return adopt(built.sources, environment=built.environment())
        sources, folders = [], []
        for source in self.sources:
            folder = source.parcel.unpacked(cache_folder() / "kernels") / "kernels"
            place = str(folder / source.place) if source.is_file else source.place
            sources.append(KernelSource(place, source.package))
            if not source.is_file:
                folders.append(str(folder))
        paths = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} if folders else None
        return adopt(sources, environment=environment)


def ship_kernels(
    sources: Sequence[KernelSource],
    project: Project | None,
    revision: ProjectRevision | None,
    times: Times,
) -> ShippedKernels | None:
    """Put sources, or the commit of a project, into the object store; None: there are neither.

    project: with the file of the commit. Raises SourceError, GitError.
    """
    if project is not None and revision is not None:
        repository = shipped(project.root, (revision.checkout,), project, name=revision.name)
        return ShippedKernels((), repository, revision.name, times.start, times.case)
    if sources:
        shipped_sources = tuple(map(_shipped_source, sources))
        return ShippedKernels(shipped_sources, start_s=times.start, case_s=times.case)
    return None


def _shipped_source(source: KernelSource) -> ShippedSource:
    root, files = files_of_source(source)
    content = packed_files({f"kernels/{path.relative_to(root).as_posix()}": path for path in files})
    place = str(Path(source.place).relative_to(root)) if source.is_file else source.place
    return ShippedSource(place, source.prefix, source.is_file, parcel(content))
