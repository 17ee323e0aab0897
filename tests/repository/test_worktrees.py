"""Worktrees and revisions of a repository."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.repository.worktrees import (
    is_published,
    refuse_local_changes,
    repository_of,
    resolve_revision,
    worktree,
)


@pytest.fixture
def tree(tmp_path, monkeypatch, git) -> Path:
    """A repository of two commits of one file; the cache folder is the test's own."""
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    for text in ("first", "second"):
        (root / "file.txt").write_text(text)
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", text)
    git(root, "tag", "v1.0", "HEAD~1")
    return root


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "cache" / "worktrees"


def test_worktrees_exist_only_inside_the_block(tree, home, git):
    with worktree(tree, "v1.0") as old, worktree(tree, "HEAD") as new:
        assert [(f / "file.txt").read_text() for f in (old, new)] == ["first", "second"]

    assert list(home.iterdir()) == []
    assert len(git(tree, "worktree", "list").splitlines()) == 1


def test_worktree_is_removed_after_an_exception(tree, home):
    def use() -> None:
        with worktree(tree, "HEAD") as folder:
            (folder / "left.txt").write_text("behind")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()

    assert list(home.iterdir()) == []


def test_disk_without_space_for_a_worktree_is_named(tree, home):
    home.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(home)]  # for git's own file
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        with (
            pytest.raises(InfrastructureError, match=r"unable to write file .*: make space on"),
            worktree(tree, "HEAD"),
        ):
            pass
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


def test_worktree_of_a_killed_process_is_removed(tree, home, git):
    program = (
        "import os; from pathlib import Path\n"
        "from flexq_bench.repository.worktrees import worktree\n"
        f"with worktree(Path({str(tree)!r}), 'HEAD'): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    (abandoned,) = home.iterdir()

    with worktree(tree, "HEAD") as folder:
        assert list(home.iterdir()) == [folder]

    assert not abandoned.exists()
    assert len(git(tree, "worktree", "list").splitlines()) == 1


def test_worktree_of_a_live_process_stays(tree, home):
    with worktree(tree, "HEAD") as first:
        with worktree(tree, "HEAD"):
            pass
        assert (first / "file.txt").exists()


def test_revisions_are_resolved_by_git(tree, git):
    sha = git(tree, "rev-parse", "HEAD~1")

    assert {resolve_revision(tree, name) for name in ("v1.0", "main~1", sha, sha[:8])} == {sha}


def test_what_was_fetched_for_a_pull_request_is_not_published(tree, git):
    main = git(tree, "rev-parse", "HEAD")
    git(tree, "checkout", "-q", "-b", "proposed")
    git(tree, "commit", "-q", "--allow-empty", "-m", "from a fork")
    theirs = git(tree, "rev-parse", "HEAD")
    assert is_published(tree, theirs)
    git(tree, "checkout", "-q", "--detach", main)
    assert is_published(tree, theirs)  # it is a branch's

    git(tree, "branch", "-q", "-D", "proposed")
    for name in ("refs/pull/7/head", "refs/remotes/pull/7/merge"):
        git(tree, "update-ref", name, theirs)

    assert not is_published(tree, theirs)
    assert is_published(tree, main)


@pytest.mark.parametrize("revision", ["maim", "", "--all", "f" * 40])
def test_unknown_revision_lists_similar_names(tree, revision):
    with pytest.raises(UsageError, match=rf"no revision {revision!r} in .*: there are .*main"):
        resolve_revision(tree, revision)


def test_working_tree_is_refused_as_a_revision(tree):
    with pytest.raises(UsageError, match="not the working tree: commit first, and give HEAD"):
        resolve_revision(tree, ".")


def test_unknown_revision_in_a_shallow_clone_is_refused(tree, tmp_path, git):
    clone = tmp_path / "shallow"
    git(tree, "clone", "-q", "--depth", "1", tree.as_uri(), str(clone))

    with pytest.raises(UsageError, match="shallow clone: git fetch --unshallow"):
        resolve_revision(clone, "HEAD~1")


def test_folder_outside_a_repository_is_refused(tmp_path):
    with pytest.raises(UsageError, match=f"{re.escape(str(tmp_path))} is not in a git repository"):
        repository_of(tmp_path)


def test_local_changes_on_the_judged_commit_are_refused(tree, git):
    head = git(tree, "rev-parse", "HEAD")
    refuse_local_changes(tree, head)
    (tree / "file.txt").write_text("third")

    with pytest.raises(UsageError, match="has local changes"):
        refuse_local_changes(tree, head)
    refuse_local_changes(tree, git(tree, "rev-parse", "HEAD~1"))
