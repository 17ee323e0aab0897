"""Provenance of the code that ran: the git commit of its packages, or an installed wheel."""

from __future__ import annotations

import hashlib
import logging
import os
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

from flexq_bench.db.records import CommitInfo
from flexq_bench.errors import InfrastructureError
from flexq_bench.packages import PACKAGE
from flexq_bench.repository.ancestry import measured_branch
from flexq_bench.repository.git import GitError, git_output, parents_of

ROOT = Path(__file__).resolve().parents[2]  # the folder of the packages
# Folders of a checkout, for git. In flexq_bench they are links, which git does not follow.
PACKAGES = ("workloads", "kernels", "flexq_bench", "db")
_NOT_MEASURING = frozenset({"ci", "dashboard"})  # parts that affect no result
DISTRIBUTION = "flexq-bench"
_SOURCE_SUFFIXES = {".py", ".cu", ".cuh", ".toml", ".json"}
_FIELD_SEPARATOR = "\x1f"

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


def _git_commit(root: Path) -> CommitInfo | None:
    # A wheel inside another repository (a .venv in a checkout) is not that repository's code.
    if _git(root, "ls-files", "--error-unmatch", "flexq_bench/__init__.py") is None:
        return None
    return _described(root, "HEAD", dirty=is_dirty(root))


def _described(root: Path, revision: str, *, dirty: bool) -> CommitInfo | None:
    form = f"--format={_FIELD_SEPARATOR.join(('%H', '%an', '%cI', '%s'))}"
    described = _git(root, "log", "-1", form, revision)
    if not described:
        return None
    # Authors and subjects may contain invalid UTF-8, which can be neither stored nor printed.
    text = described.encode(errors="replace").decode()
    sha, author, committed_at, subject = text.split(_FIELD_SEPARATOR, 3)
    parents = parents_of(root, sha)
    _clones[sha] = root
    return CommitInfo(
        sha=sha,
        parent=parents[0] if parents else None,
        topo_order=None,
        dirty=dirty,
        subject=subject,
        author=author,
        committed_at=datetime.fromisoformat(committed_at).astimezone(UTC).isoformat(),
        parents=parents,
        branch=measured_branch(root, sha),
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
