"""Revisions named by a person, resolved to commits that can be compared."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from flexq_bench.errors import UsageError
from flexq_bench.measure.ab.worker_command import WORKER_MODULES, file_of, worker_module
from flexq_bench.repository.git import git_output, run_git
from flexq_bench.repository.provenance import PACKAGES
from flexq_bench.repository.working_tree import WORKING_TREE, snapshot
from flexq_bench.repository.worktrees import commits_after, resolve_revision

_FULL_ID = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


class RevisionError(UsageError):
    """A revision that can't be compared; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Revision:
    """name: the full id of a commit, with "-dirty" for a working tree with changes.

    commit: to check out.
    """

    name: str
    commit: str


def resolve_pair(repository: Path, base: str, head: str) -> tuple[Revision, Revision]:
    """The commits that two revisions name; `.` is the working tree as it is now.

    Raises UsageError if git knows no such commit, if a commit has no worker of ours, or if a name
    means the checked-out commit while files differ from it and neither is `.`: after editing a
    file, HEAD could be mistaken for the edited version. A full id is no such name.
    """
    resolved = tuple(_resolve(repository, revision) for revision in (base, head))
    if WORKING_TREE not in (base, head):
        for written, revision in zip((base, head), resolved, strict=True):
            _refuse_changes(repository, written, revision)
    return resolved[0], resolved[1]


def commits_between(repository: Path, good: str, bad: str) -> list[str]:
    """Return those of `commits_after` that change our packages."""
    listed = ("rev-list", "--first-parent", f"{good}..{bad}", "--", *PACKAGES)
    commits = commits_after(repository, good, bad)
    changing = set(git_output(repository, *listed).splitlines())
    return [commit for commit in commits if commit in changing]


@dataclass(frozen=True, slots=True)
class MergedBranch:
    """Commits that a merge brought in: those after `good` up to `bad`."""

    good: str
    bad: str
    commits: int


def merged_branches(repository: Path, commit: str, unchanged: str) -> list[MergedBranch]:
    """Branches that a merge joined to the commits of a search by first parents; empty: no merge.

    unchanged: the last commit of the search before the merge.
    """
    # A failure here must not discard the results of a long search, because the branches are only a
    # hint.
    parents = run_git(repository, "log", "-1", "--format=%P", commit)
    first, *other_parents = parents.stdout.split() or [""]
    if not other_parents:
        return []
    seen = run_git(repository, "merge-base", "--is-ancestor", unchanged, first).returncode == 0
    known = (f"^{unchanged}", *([f"^{first}"] if seen else []))
    branches = []
    for tip in other_parents if seen else (first, *other_parents):
        count = int(git_output(repository, "rev-list", "--count", tip, *known))
        base = run_git(repository, "merge-base", unchanged, tip).stdout.strip()
        if count and base:  # unrelated histories have none
            branches.append(MergedBranch(base, tip, count))
    return branches


def subject_of(repository: Path, commit: str) -> str:
    """The first line of a commit's message."""
    return git_output(repository, "log", "-1", "--format=%s", commit)


def _resolve(repository: Path, revision: str) -> Revision:
    if revision == WORKING_TREE:
        tree = snapshot(repository, PACKAGES)
        name = f"{tree.head}-dirty" if tree.dirty else tree.head
        resolved = Revision(name, tree.commit)
    else:
        sha = resolve_revision(repository, revision)
        resolved = Revision(sha, sha)
    if not _has(repository, resolved.commit, "flexq_bench/__init__.py"):
        raise RevisionError(
            f"{revision} is not a commit of FlexQ Bench: it has no flexq_bench/ (a commit of your "
            "repository: --project PATH)"
        )
    if worker_module(lambda path: _has(repository, resolved.commit, path)) is None:
        raise RevisionError(
            f"{revision} is from before commits could be compared: it has no "
            f"{' and no '.join(map(file_of, WORKER_MODULES))}"
        )
    return resolved


def _refuse_changes(repository: Path, written: str, revision: Revision) -> None:
    if _FULL_ID.fullmatch(written) or revision.commit != resolve_revision(repository, "HEAD"):
        return
    if snapshot(repository, PACKAGES).dirty:
        raise RevisionError(
            f"the working tree has changes that {written} has not: commit them, compare them as "
            f"`{WORKING_TREE}`, or leave them out by the commit's full id, {revision.commit}"
        )


def _has(repository: Path, commit: str, path: str) -> bool:
    return run_git(repository, "cat-file", "-e", f"{commit}:{path}").returncode == 0
