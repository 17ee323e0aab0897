"""Revisions of a repository, and temporary checkouts of them."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.kernels.runtime.files import cache_folder, in_cache
from flexq_bench.repository.git import (
    git_lines,
    git_output,
    refuse_large_tree,
    run_git,
    without_filters,
)
from flexq_bench.repository.provenance import is_dirty

_MAX_NAMES = 8  # maximum number of similar names in an error
_UNWRITTEN = re.compile(r"unable to write file .+")


def repository_of(folder: Path) -> Path:
    """Return the top folder of the git tree that contains `folder`. Raises UsageError."""
    done = run_git(folder, "rev-parse", "--show-toplevel")
    if done.returncode == 0:
        return Path(done.stdout.strip())
    # What git says with and, before version 2.38, without safe.bareRepository.
    if re.search("cannot use bare repository|must be run in a work tree", done.stderr):
        raise UsageError(
            f"{folder} is a bare repository, which has no files: make a checkout of it "
            f"(git clone, or git -C {shlex.quote(str(folder))} worktree add FOLDER) and name that"
        )
    message = _last_line(done.stderr)
    if "safe.directory" in message:
        raise UsageError(f"git does not trust {folder}, whose owner is another user: {message}")
    raise UsageError(f"{folder} is not in a git repository: run this in your checkout ({message})")


def resolve_revision(repository: Path, revision: str) -> str:
    """Return the full sha of a revision: a branch, a tag, HEAD~2, a prefix of a sha.

    Raises UsageError if git doesn't know it, with similar names, or with the command that fetches
    it if the clone is shallow; and as refuse_large_tree.
    """
    sha = find_revision(repository, revision)
    if sha is not None:
        refuse_large_tree(repository, sha)
        return sha
    if is_shallow(repository):
        raise UsageError(
            f"no revision {revision!r} in this shallow clone: git fetch --unshallow first "
            "(in a workflow: fetch-depth: 0)"
        )
    if revision == os.curdir:
        raise UsageError("this takes commits, not the working tree: commit first, and give HEAD")
    names = git_lines(repository, "for-each-ref", "--format=%(refname:short)")
    if not names and find_revision(repository, "HEAD") is None:
        raise UsageError(f"{repository} has no commit yet: git commit first")
    near = difflib.get_close_matches(revision, names, n=_MAX_NAMES, cutoff=0.0)
    there_are = ", ".join(near) or "no branches and no tags"
    raise UsageError(f"no revision {revision!r} in {repository}: there are {there_are}")


def is_shallow(repository: Path) -> bool:
    """Return True if the clone lacks early commits."""
    return run_git(repository, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"


def find_revision(repository: Path, revision: str) -> str | None:
    """Return the full sha of a revision; None: unknown. Raises GitError if git can't be run."""
    done = run_git(
        repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
    )
    return done.stdout.strip() if done.returncode == 0 else None


def commits_after(repository: Path, good: str, bad: str) -> list[str]:
    """Return the commits after `good` up to `bad`, oldest first, that are relevant to a search.

    These are the first parents of bad that contain good; commits on bad's side from before `good`
    was merged do not contain it. Raises UsageError if good is not an ancestor of bad.
    """
    if run_git(repository, "merge-base", "--is-ancestor", good, bad).returncode != 0:
        if is_shallow(repository):
            raise UsageError(
                f"this shallow clone does not show whether {good[:10]} is an ancestor of "
                f"{bad[:10]}: git fetch --unshallow first (in a workflow: fetch-depth: 0)"
            )
        raise UsageError(
            f"{good[:10]} is not an ancestor of {bad[:10]}: name a good revision that bad was "
            "made from"
        )
    between = f"{good}..{bad}"
    # In a single call, `good` would be followed along first parents only.
    containing = set(git_output(repository, "rev-list", "--ancestry-path", between).splitlines())
    first = git_output(repository, "rev-list", "--first-parent", "--reverse", between).splitlines()
    return [commit for commit in first if commit in containing]


def is_published(repository: Path, sha: str) -> bool:
    """Return True if a commit is in the history of HEAD, of a branch or of a tag.

    A commit that was only fetched for a pull request (refs/pull, refs/remotes/pull) is in none of
    these. Raises GitError if git can't be run.
    """
    if run_git(repository, "merge-base", "--is-ancestor", sha, "HEAD").returncode == 0:
        return True
    places = ("refs/heads", "refs/tags", "refs/remotes")
    done = run_git(repository, "for-each-ref", "--format=%(refname)", f"--contains={sha}", *places)
    names = filter(None, done.stdout.split("\n"))
    return any(not name.startswith("refs/remotes/pull/") for name in names)


def refuse_local_changes(repository: Path, sha: str) -> None:
    """Raise UsageError if `sha` is checked out with local changes, which would not be judged."""
    head = run_git(repository, "rev-parse", "HEAD").stdout.strip()
    if head == sha and is_dirty(repository):
        raise UsageError(
            f"{repository} has local changes that {sha[:10]} has not: commit or stash them first"
        )


@contextmanager
def worktree(repository: Path, revision: str) -> Iterator[Path]:
    """Check out a revision into a temporary folder, and remove it at the end of the block.

    The folder is in the cache folder. Folders of killed processes are removed by the next call.
    Raises UsageError as resolve_revision, CacheError, InfrastructureError if git can't check it
    out.
    """
    sha = resolve_revision(repository, revision)
    home = _home()
    with in_cache(home):
        _remove_abandoned(repository, home)
        folder = Path(tempfile.mkdtemp(dir=home, prefix=f"{sha[:12]}.{_owner()}."))
        folder.chmod(0o755)  # as git makes it: the user of a sandbox reads it
    try:
        added = ("worktree", "add", "--detach", "--force", str(folder), sha)
        done = run_git(repository, *without_filters(repository), *added)
        if done.returncode != 0:
            reason = _last_line(done.stderr)
            if (unwritten := _UNWRITTEN.search(done.stderr)) is not None:  # git does not say why
                reason = (
                    f"{unwritten[0]}: make space on the disk of {home}, and check who may write"
                )
            raise InfrastructureError(f"git can't check out {sha[:10]}: {reason}")
        yield folder
    finally:
        _remove(repository, folder)


def _remove(repository: Path, folder: Path) -> None:
    run_git(repository, "worktree", "remove", "--force", "--force", str(folder))
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run_git(repository, "worktree", "prune")


def _remove_abandoned(repository: Path, home: Path) -> None:
    for folder in home.iterdir():
        owner = re.fullmatch(rf"[0-9a-f]{{12}}\.{re.escape(_host())}-(\d+)\..*", folder.name)
        if owner and not _is_alive(int(owner[1])):
            with contextlib.suppress(OSError):
                _remove(repository, folder)


def _home() -> Path:
    return cache_folder() / "worktrees"


def _owner() -> str:
    return f"{_host()}-{os.getpid()}"


def _host() -> str:
    # A home may be shared by hosts; a process of another host must not count as dead.
    return re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "it says nothing"
