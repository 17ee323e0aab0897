"""The working tree of a repository as a commit that is on no branch."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flexq_bench.errors import UsageError
from flexq_bench.repository.git import git_lines, git_output, run_git
from flexq_bench.repository.worktrees import resolve_revision

WORKING_TREE = "."  # the working tree, where a revision is expected
# Author and committer of temporary commits, which are on no branch.
_NOBODY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "flexq-bench"), ("EMAIL", "flexq-bench@localhost"))
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The working tree at one time. head: the checked-out commit. commit: the one to check out."""

    head: str
    commit: str

    @property
    def dirty(self) -> bool:
        """True if files differ from those of the checked-out commit."""
        return self.commit != self.head


def snapshot(root: Path, folders: Sequence[str] = ()) -> Snapshot:
    """Return the checked-out commit with the changes and the new files of the working tree.

    Ignored files are not included, nor changes inside submodules, which are named in a log message.
    folders: the part of the repository that counts, relative to `root`; empty: all of it. The index
    is not changed. Raises UsageError if there is no commit yet, a merge with conflicts is not
    finished, or git can't add a file.
    """
    head = resolve_revision(root, "HEAD")
    unmerged = git_lines(root, "diff", "--name-only", "--diff-filter=U")
    if unmerged:
        raise UsageError(
            f"{root} has conflicts of a merge, in {unmerged[0]}: resolve and git add them first, "
            "or abort the merge"
        )
    _log_left_out(_changed_submodules(root))
    tree = _write_tree(root, folders)
    if tree == git_output(root, "rev-parse", f"{head}^{{tree}}"):
        return Snapshot(head, head)
    return Snapshot(head, commit_on_no_branch(root, tree, [head], "the working tree"))


def commit_on_no_branch(root: Path, tree: str, parents: Sequence[str], message: str) -> str:
    """Make a commit of a tree, and return its full sha."""
    options = [option for parent in parents for option in ("-p", parent)]
    return git_output(root, "commit-tree", tree, *options, "-m", message, environment=_NOBODY)


def _write_tree(root: Path, folders: Sequence[str]) -> str:
    """Write the tree of the files as they are now, and return its name.

    A copy of the index is updated: `git stash create` would ignore submodules, and fail for a file
    that is to be added later (`git add --intent-to-add`).
    """
    index = root / git_output(root, "rev-parse", "--git-path", "index")
    counted = [folder for folder in folders if (root / folder).is_dir()] if folders else ["."]
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "index"
        if index.is_file():
            shutil.copy2(index, copy)
        environment = {"GIT_INDEX_FILE": str(copy)}
        if folders:  # what is staged elsewhere does not count
            others = (".", *(f":(exclude){folder}" for folder in folders))
            git_output(root, "reset", "--quiet", "HEAD", "--", *others, environment=environment)
        if counted:
            added = run_git(root, "add", "--all", "--", *counted, environment=environment)
            if added.returncode != 0:
                reason = added.stderr.strip().partition("\n")[0].removeprefix("error: ")
                raise UsageError(f"git can't add the files of {root}: {reason}")
        return git_output(root, "write-tree", environment=environment)


def _changed_submodules(root: Path) -> tuple[str, ...]:
    """Return the paths of submodules with changes of tracked files that no commit of theirs has."""
    options = ("--ignore-submodules=none", "--no-renames", "--untracked-files=no")
    listing = ("status", "--porcelain=v2", "-z", *options)
    # "1 XY S<c><m><u> modes and names path"; m is M if tracked files are changed
    lines = (line.split(" ", 8) for line in git_output(root, *listing).split("\0"))
    return tuple(
        words[8]
        for words in lines
        if words[0] == "1" and words[2].startswith("S") and words[2][2:3] == "M"
    )


@cache  # once per process
def _log_left_out(submodules: tuple[str, ...]) -> None:
    if submodules:
        more = f" and {len(submodules) - 1} more" if submodules[1:] else ""
        log.warning(
            "not measured: changes in submodule %s%s: commit them there", submodules[0], more
        )
