"""Commits of a repository on nodes that have none of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

from flexq_bench.db.records import CommitInfo
from flexq_bench.fleet.node_program import Parcel
from flexq_bench.fleet.shared_builds import NodeBuilds
from flexq_bench.fleet.shipping import packed, parcel, session_name
from flexq_bench.kernels.runtime.files import cache_folder
from flexq_bench.measure.ab import compare_judged, compare_judged_project, compare_project
from flexq_bench.measure.ab.commits import compare_revisions
from flexq_bench.measure.ab.experiment import Options
from flexq_bench.measure.ab.revisions import Revision
from flexq_bench.repository.commit_packs import clone_with, write_commit
from flexq_bench.repository.project import Project, ProjectRevision
from flexq_bench.repository.project_builds import share_builds
from flexq_bench.repository.worktrees import resolve_revision
from flexq_bench.verdicts import CaseComparison
from flexq_bench.workloads.case import Case

_FOLDER = "commit"
_DIRTY = "-dirty"


@dataclass(frozen=True, slots=True)
class ShippedRepository:
    """Commits of a repository as objects of Ray.

    checkouts: commit to check out, by name: a full sha, with "-dirty" for a working tree with
    changes. parcels: of these commits. project: the repository's project, with the root that the
    coordinator has; None: this program.
    """

    checkouts: Mapping[str, str]
    parcels: Mapping[str, Parcel]
    project: Project | None = None

    def unpacked(self) -> Path:
        """Return a clone with the commits, in this node's cache folder.

        Raises OSError if an object arrives damaged, CacheError, GitError.
        """
        home = cache_folder()
        folders = {
            sha: item.unpacked(home / "commits") / _FOLDER for sha, item in self.parcels.items()
        }
        return clone_with(folders, home / "clones")

    def project_here(self) -> Project:
        """Return the project with a clone on this node as its root."""
        assert self.project is not None  # the caller has one
        share_builds(NodeBuilds())
        return replace(self.project, root=self.unpacked())

    def compare(
        self,
        base: str,
        head: str,
        cases: Sequence[Case],
        *,
        judged: bool = False,
        **options: Unpack[Options],
    ) -> Iterator[CaseComparison]:
        """Compare two of the commits, by name, on this node, as compare_commits or compare_project.

        judged: head is not trusted, see compare_judged. Raises what these functions raise.
        """
        first, second = self.checkouts[base], self.checkouts[head]
        if self.project is not None:
            project, ends = self.project_here(), (self.revision(base), self.revision(head))
            if judged:
                yield from compare_judged_project(project, *ends, cases, **options)
            else:
                yield from compare_project(project, *ends, cases, **options)
            return
        clone = self.unpacked()
        if judged:
            yield from compare_judged(clone, first, second, cases, **options)
            return
        revisions = Revision(base, first), Revision(head, second)
        yield from compare_revisions(clone, revisions, cases, **options)

    def revision(self, name: str) -> ProjectRevision:
        """Return a revision of the project, with the part of its commit that names it."""
        sha, dirty, _ = name.partition(_DIRTY)
        return ProjectRevision(CommitInfo(sha, None, None, dirty=dirty != ""), self.checkouts[name])


def shipped(
    repository: Path, commits: Sequence[str], project: Project | None, *, name: str = ""
) -> ShippedRepository:
    """Put commits, by full sha, into the object store of the Ray session.

    name: of the last one, if it is a temporary commit. Raises UsageError if the repository lacks
    one, GitError.
    """
    session = session_name()
    parcels = {sha: _shipped_commit(repository, sha, session) for sha in commits}
    checkouts = {sha: sha for sha in commits} | ({name: commits[-1]} if name else {})
    return ShippedRepository(checkouts, parcels, project)


@lru_cache(maxsize=64)
def _shipped_commit(repository: Path, sha: str, session: str) -> Parcel:
    resolve_revision(repository, sha)
    with TemporaryDirectory() as folder:
        place = Path(folder) / _FOLDER
        place.mkdir()
        write_commit(repository, sha, place)
        return parcel(packed(place))
