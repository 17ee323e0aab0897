"""Git, as all of this package calls it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from flexq_bench.errors import InfrastructureError

_TIMEOUT_S = 120.0  # a checkout of a large tree on a slow disk
# Inside a git hook these point at the hook's repository, whichever folder git is told.
_OF_A_HOOK = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"}
# A repository may have its hooks in the tree: code of the revision that is checked out.
_NO_PROGRAMS = ("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false")


class GitError(InfrastructureError):
    """Git itself failed."""


def run_git(
    folder: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    input_text: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """A git command in a folder, without its hooks, whatever the exit code.

    given: for its stdin. Raises GitError if it doesn't run.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    own = {"LC_ALL": "C", "GIT_LFS_SKIP_SMUDGE": "1"}
    try:
        return subprocess.run(
            ["git", *_NO_PROGRAMS, "-C", str(folder), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # a file may have any name
            timeout=_TIMEOUT_S,
            input=input_text or "",
            env={**inherited, **own, **(environment or {})},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git {arguments[0]} does not run: {error}") from error


def git_output(
    folder: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    input_text: str | None = None,
) -> str:
    """Output of a git command in a folder. Raises GitError with what git says if it fails."""
    done = run_git(folder, *arguments, environment=environment, input_text=input_text)
    if done.returncode != 0:
        messages = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise GitError(f"git {arguments[0]}: {messages[-1]}")
    return done.stdout.strip()


def commits_with(folder: Path, good: str, bad: str) -> list[str]:
    """Commits after `good` up to `bad`, oldest first: of bad's first parents those that contain
    good. Before a branch with `good` was merged, the others did not. Raises GitError."""
    between = f"{good}..{bad}"
    # Both in one call would follow `good` along first parents alone.
    containing = set(git_output(folder, "rev-list", "--ancestry-path", between).splitlines())
    first = git_output(folder, "rev-list", "--first-parent", "--reverse", between).splitlines()
    return [commit for commit in first if commit in containing]


def commits_of_tags(folder: Path) -> dict[str, str]:
    """The full sha of the commit of each tag, by the tag's name. Raises GitError outside of git."""
    # What an annotated tag points at stands in the last field, which a plain one leaves empty.
    form = "%(refname:short)%09%(objecttype)%09%(objectname)%09%(*objecttype)%09%(*objectname)"
    lines = git_output(folder, "for-each-ref", "refs/tags", f"--format={form}").splitlines()
    tags = {}
    for line in lines:
        name, *objects = line.split("\t")
        kind, sha = objects[2:] if objects[0] == "tag" else objects[:2]
        if kind == "commit":
            tags[name] = sha
    return tags
