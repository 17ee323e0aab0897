"""Calls of git for this package."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from flexq_bench.errors import InfrastructureError

_TIMEOUT_S = 120.0  # a checkout of a large tree on a slow disk
# Inside a git hook these variables name the hook's repository, in any folder.
_OF_A_HOOK = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"}
# The hooks of a repository may be part of the tree: code of the checked-out revision.
_NO_PROGRAMS = ("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false")


class GitError(InfrastructureError):
    """Git itself failed."""


def run_git(
    folder: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    input_text: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a git command in a folder, without hooks; any exit code is returned.

    input_text: for its stdin. Raises GitError if it doesn't run.
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
    """Output of a git command in a folder. Raises GitError with git's message if it fails."""
    done = run_git(folder, *arguments, environment=environment, input_text=input_text)
    if done.returncode != 0:
        messages = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise GitError(f"git {arguments[0]}: {messages[-1]}")
    return done.stdout.strip()


def commits_with(folder: Path, good: str, bad: str) -> list[str]:
    """Commits after `good` up to `bad`, oldest first.

    They are the first parents of bad that contain good; those from before a branch with `good` was
    merged do not. Raises GitError.
    """
    between = f"{good}..{bad}"
    # A single call would follow only the first parents of `good`, too.
    containing = set(git_output(folder, "rev-list", "--ancestry-path", between).splitlines())
    first = git_output(folder, "rev-list", "--first-parent", "--reverse", between).splitlines()
    return [commit for commit in first if commit in containing]


def commits_of_tags(folder: Path) -> dict[str, str]:
    """The full sha of the commit of each tag, by the tag's name. Raises GitError outside of git."""
    # The last field has the target of an annotated tag, and is empty for a plain one.
    form = "%(refname:short)%09%(objecttype)%09%(objectname)%09%(*objecttype)%09%(*objectname)"
    lines = git_output(folder, "for-each-ref", "refs/tags", f"--format={form}").splitlines()
    tags = {}
    for line in lines:
        name, *objects = line.split("\t")
        kind, sha = objects[2:] if objects[0] == "tag" else objects[:2]
        if kind == "commit":
            tags[name] = sha
    return tags
