"""Provenance of the code that ran: the git commit of its packages, or an installed wheel."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path

from flexq_bench.db.records import CommitInfo
from flexq_bench.errors import InfrastructureError
from flexq_bench.packages import PACKAGE
from flexq_bench.repository.ancestry import measured_branch
from flexq_bench.repository.git import GitError, git_output, parents_of, time_of

ROOT = Path(__file__).resolve().parents[2]  # the folder of the packages
# Folders of a checkout, for git. In flexq_bench they are links, which git does not follow.
PACKAGES = ("workloads", "kernels", "flexq_bench", "db")
_NOT_MEASURING = frozenset({"ci", "dashboard"})  # parts that affect no result
DISTRIBUTION = "flexq-bench"
_SOURCE_SUFFIXES = {".py", ".cu", ".cuh", ".toml", ".json"}
_FORMAT = "--format=%H %P%x00%an%x00%ct%x00%s%x00"  # names may have any character but a zero byte
_MOST_LETTERS = 1000  # of a subject or name; dashboards show them

_clones: dict[str, Path] = {}  # by sha of a commit that was read there

log = logging.getLogger(__name__)


@cache
def current_commit() -> CommitInfo:
    """Return the commit of the running code; cached, since imported code doesn't change."""
    return commit_of(ROOT)


def commit_of(root: Path) -> CommitInfo:
    """Return the commit of the packages in the folder `root`.

    In a git tree that tracks them this is HEAD. It is dirty if a tracked file differs from HEAD, or
    a package contains a file that git neither tracks nor ignores. Elsewhere (a wheel, a copied
    folder) its sha is `pkg-<version>-<hash of the sources>`, and it is never dirty.
    """
    return _git_commit(root) or _package_commit(root)


def commit_at(root: Path, sha: str) -> CommitInfo:
    """Return a commit of the git tree at `root`, regardless of local changes.

    sha: in full, as flexq_bench.repository.worktrees.resolve_revision returns it. Raises
    InfrastructureError if git can't read the commit.
    """
    commit = _described(root, sha, dirty=False)
    if commit is None:
        raise InfrastructureError(
            f"git has no information about {sha} in {root}: run git fsck there"
        )
    return commit


def commits_at(root: Path, shas: Collection[str]) -> dict[str, CommitInfo]:
    """Return the commits that a git tree has, by the given shas, which may be abbreviated.

    Two calls of git read any number of them. Raises GitError if git does not run.
    """
    asked = "\n".join(f"{sha}^{{commit}}" for sha in shas)
    objects = git_output(root, "cat-file", "--batch-check=%(objectname)", input_text=asked)
    pairs = zip(shas, objects.split("\n"), strict=False)
    full = {sha: name for sha, name in pairs if " " not in name}
    if not full:
        return {}
    listing = ("log", "--no-walk=unsorted", "--stdin", _FORMAT)
    lines = git_output(root, *listing, input_text="\n".join(full.values())).split("\n")
    described = {commit.sha: commit for commit in map(_parsed, lines)}
    for commit in described.values():
        _clones[commit.sha] = root
    return {sha: described[name] for sha, name in full.items() if name in described}


def _git_commit(root: Path) -> CommitInfo | None:
    # A wheel inside another repository (a .venv in a checkout) is not that repository's code.
    if _git(root, "ls-files", "--error-unmatch", "flexq_bench/__init__.py") is None:
        return None
    return _described(root, "HEAD", dirty=is_dirty(root))


def _described(root: Path, revision: str, *, dirty: bool) -> CommitInfo | None:
    described = _git(root, "log", "-1", _FORMAT, revision)
    if not described:
        return None
    commit = _parsed(described)
    parents = parents_of(root, commit.sha)  # all, also where a shallow clone ends
    _clones[commit.sha] = root
    return replace(
        commit,
        parent=parents[0] if parents else None,
        parents=parents,
        dirty=dirty,
        branch=measured_branch(root, commit.sha),
    )


def _parsed(description: str) -> CommitInfo:
    # Authors and subjects may contain invalid UTF-8, which can be neither stored nor printed.
    text = description.encode(errors="replace").decode()
    shas, author, seconds, subject, _ = text.split("\0")
    committed_at = time_of(seconds)
    sha, *parents = shas.split()
    return CommitInfo(
        sha=sha,
        parent=parents[0] if parents else None,
        topo_order=None,
        dirty=False,
        subject=subject[:_MOST_LETTERS],
        author=author[:_MOST_LETTERS],
        committed_at=None if committed_at is None else committed_at.isoformat(),
        parents=tuple(parents),
    )


def clone_of(commit: CommitInfo) -> Path | None:
    """Return the clone in which this process read a commit; None: in none."""
    return _clones.get(commit.sha)


def is_dirty(root: Path) -> bool:
    """Return True if a git tree differs from HEAD: a tracked file, or a new one in a package."""
    tracked = _git(root, "status", "--porcelain", "--untracked-files=no")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "--", *PACKAGES)
    # After a failure (a timeout) the tree counts as dirty, so that it can't become a baseline.
    return tracked != "" or untracked != ""


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command in `root`; None: it failed, or git is missing."""
    try:
        return git_output(root, *arguments)
    except GitError as error:
        log.debug("%s", error)
        return None


def _package_commit(root: Path) -> CommitInfo:
    return CommitInfo(
        sha=f"pkg-{package_version()}-{source_hash(root)}",
        parent=None,
        topo_order=None,
        dirty=False,
        subject="installed package",
        branch=measured_branch(),
    )


def package_version() -> str:
    """Return the version of the installed distribution; `0`: only the source folder exists."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0"


def source_hash(root: Path) -> str:
    """Return twelve hexadecimal digits that identify the sources in `root` that affect results.

    They are a hash of names and contents of the kernels and workloads, and of the code that
    measures, checks and stores them.
    """
    digest = hashlib.sha256()
    for path in _source_files(root / PACKAGE):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _source_files(package: Path) -> list[Path]:
    files: list[Path] = []
    # the rooms of a checkout are links
    for folder, folders, names in os.walk(package, followlinks=True):
        if Path(folder) == package:
            folders[:] = [name for name in folders if name not in _NOT_MEASURING]
        files += [Path(folder, name) for name in names if Path(name).suffix in _SOURCE_SUFFIXES]
    return sorted(files)
