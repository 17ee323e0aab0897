"""Calls of git with the settings that all of this package uses."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from flexq_bench.errors import InfrastructureError

_TIMEOUT_S = 120.0  # long enough to check out a large tree on a slow disk
# Within a git hook these select the hook's repository, regardless of the folder of a command.
_OF_A_HOOK = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"}
# Hooks may be files of the tree, and so code of the revision that is checked out. A folder of the
# tree may look like a bare repository, whose configuration names programs.
_NO_PROGRAMS = (
    *("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false"),
    *("-c", "safe.bareRepository=explicit"),
)
# Of a commit that is checked out: files and folders, and bytes of the files.
_MAX_ENTRIES, _MAX_BYTES = 1 << 20, 1 << 35
_PROMISOR = r"^remote\..*\.promisor$"
_LAST_S = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp())
_ERRORS = "surrogateescape"  # a file may have any name
_FILTERS = r"^filter\..*\.(smudge|process|required)$"


class GitError(InfrastructureError):
    """Git can't be run, or failed."""


def run_git(
    folder: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    input_text: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a git command in a folder, without hooks, and return its result for any exit code.

    input_text: its stdin. Raises GitError if git can't be run.
    """
    try:
        done = subprocess.run(
            _command(folder, *arguments),
            capture_output=True,
            timeout=_TIMEOUT_S,
            input=(input_text or "").encode(errors=_ERRORS),
            env={**_variables(), **(environment or {})},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git {arguments[0]} does not run: {error}") from error
    # As it is: a name of a person may have a carriage return, which Python would make a line of.
    texts = [part.decode(errors=_ERRORS) for part in (done.stdout, done.stderr)]
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)


def _command(folder: Path, *arguments: str) -> list[str]:
    return ["git", *_NO_PROGRAMS, "-C", str(folder), *arguments]


def _variables() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    return inherited | {"LC_ALL": "C"}


def git_output(
    folder: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    input_text: str | None = None,
) -> str:
    """Return the output of a git command in a folder. Raises GitError with git's message."""
    done = run_git(folder, *arguments, environment=environment, input_text=input_text)
    if done.returncode != 0:
        messages = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise GitError(f"git {arguments[0]}: {messages[-1]}")
    return done.stdout.rstrip("\n")


def git_lines(folder: Path, *arguments: str) -> list[str]:
    """Return the lines of `git_output`, which names in them can't end, unlike those of Python."""
    return [line for line in git_output(folder, *arguments).split("\n") if line]


@lru_cache(maxsize=256)
def refuse_large_tree(folder: Path, commit: str) -> None:
    """Raise GitError if a commit has too many files, or too large ones, to be checked out.

    A few small objects that name each other several times expand to any number of files.
    """
    # A partial clone would fetch the files one by one to tell their sizes.
    is_partial = run_git(folder, "config", "--get-regexp", _PROMISOR).returncode == 0
    sizes = () if is_partial else ("-l",)
    listing = _command(folder, "ls-tree", "-r", "-t", *sizes, "--full-tree", commit)
    entries = size = 0
    with subprocess.Popen(
        listing, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_variables()
    ) as git:
        assert git.stdout is not None  # it was created with a pipe
        for line in git.stdout:
            of_file = line.split(None, 4)[3] if sizes else b""  # a folder has none
            entries, size = entries + 1, size + (int(of_file) if of_file.isdigit() else 0)
            if entries > _MAX_ENTRIES or size > _MAX_BYTES:
                git.kill()
                raise GitError(
                    f"{commit[:10]} has more than {_MAX_ENTRIES:,} files or {_MAX_BYTES >> 30} GiB"
                )
    if git.returncode != 0:
        raise GitError(f"git can't list the files of {commit[:10]}")


def without_filters(folder: Path) -> tuple[str, ...]:
    """Return options of git that write files as they are stored, without any configured filter.

    A filter's command may be a file of the tree, and the attributes that name it are the tree's.
    """
    names = run_git(folder, "config", "--name-only", "--get-regexp", _FILTERS).stdout.split("\n")
    return tuple(
        word
        for name in filter(None, dict.fromkeys(names))
        for word in ("-c", f"{name}={'false' if name.endswith('required') else ''}")
    )


def time_of(seconds: str) -> datetime | None:
    """Return a time that git shows in seconds; None: what a commit says is none.

    A commit may name any: those outside of what Python knows are the first or the last one there.
    """
    return datetime.fromtimestamp(min(int(seconds), _LAST_S), UTC) if seconds.isdecimal() else None


def parents_of(folder: Path, sha: str) -> tuple[str, ...]:
    """Return the parents that a commit names, whether the clone has them or not.

    Raises GitError if the clone lacks the commit.
    """
    _tree, *lines = git_output(folder, "cat-file", "commit", sha).split("\n")
    parents = takewhile(lambda words: words[0] == "parent", (line.split(" ") for line in lines))
    return tuple(words[1] for words in parents)


def commits_of_tags(folder: Path) -> dict[str, str]:
    """Return the full sha of the commit of each tag, by name. Raises GitError outside of git."""
    # The last field is the target of an annotated tag; it is empty for a lightweight one.
    form = "%(refname:short)%09%(objecttype)%09%(objectname)%09%(*objecttype)%09%(*objectname)"
    tags = {}
    for line in git_lines(folder, "for-each-ref", "refs/tags", f"--format={form}"):
        name, *objects = line.split("\t")
        kind, sha = objects[2:] if objects[0] == "tag" else objects[:2]
        if kind == "commit":
            tags[name] = sha
    return tags
