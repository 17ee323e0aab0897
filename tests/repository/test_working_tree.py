"""The working tree as a commit."""

from __future__ import annotations

import logging
import os
import subprocess
from contextlib import suppress

import pytest

from flexq_bench.errors import UsageError
from flexq_bench.repository.working_tree import snapshot


def changed_files(made, commit):
    return made.git("diff", "--name-only", "HEAD", commit).splitlines()


def test_changed_new_and_deleted_files_are_in_the_snapshot(made):
    made.commit(old_py="", ignored_py="")
    (made.path / ".git" / "info" / "exclude").write_text("*.log\n")
    (made.path / "fast.py").write_text("edited\n")
    (made.path / "new.py").write_text("new\n")
    (made.path / "build.log").touch()
    (made.path / "old.py").unlink()
    before = made.git("status", "--porcelain")

    taken = snapshot(made.path)

    assert (taken.dirty, taken.head) == (True, made.git("rev-parse", "HEAD"))
    assert changed_files(made, taken.commit) == ["fast.py", "new.py", "old.py"]
    assert made.git("show", f"{taken.commit}:fast.py") == "edited"
    assert made.git("status", "--porcelain") == before


def test_changes_outside_the_folders_do_not_count(made):
    (made.path / "kernels").mkdir()
    for name in ("docs.md", "kernels/a.py"):
        (made.path / name).write_text("first\n")
    made.commit()
    (made.path / "docs.md").write_text("staged\n")
    made.git("add", "docs.md")
    (made.path / "new.md").touch()
    folders = ("kernels", "workloads")
    assert not snapshot(made.path, folders).dirty

    (made.path / "kernels" / "a.py").write_text("edited\n")

    assert changed_files(made, snapshot(made.path, folders).commit) == ["kernels/a.py"]
    assert made.git("diff", "--cached", "--name-only") == "docs.md"


def test_touched_files_are_no_changes(made):
    os.utime(made.path / "fast.py", (1, 1))  # as after a copy of the folder

    assert not snapshot(made.path).dirty


def test_files_to_be_added_later_are_in_the_snapshot(made):
    (made.path / "new.py").write_text("new\n")
    made.git("add", "--intent-to-add", "new.py")

    assert made.git("show", f"{snapshot(made.path).commit}:new.py") == "new"
    assert made.git("status", "--porcelain") == "A new.py"


def test_merge_with_conflicts_is_refused(made):
    made.git("checkout", "-q", "-b", "feature/other")
    made.commit(fast_py="theirs\n")
    made.git("checkout", "-q", "main")
    made.commit(fast_py="ours\n")
    with suppress(subprocess.CalledProcessError):
        made.git("merge", "-q", "feature/other")

    with pytest.raises(UsageError, match=r"conflicts of a merge, in fast\.py: resolve"):
        snapshot(made.path)


def test_repository_without_a_commit_is_refused(tmp_path, git):
    git(tmp_path, "init", "-q")

    with pytest.raises(UsageError, match="has no commit yet: git commit first"):
        snapshot(tmp_path)


def test_file_that_git_cannot_add_is_named(made, git):
    git(made.path, "init", "-q", "nested")  # a repository without a commit
    (made.path / "nested" / "a.py").touch()

    with pytest.raises(UsageError, match=r"git can't add the files of .*: 'nested/' does not have"):
        snapshot(made.path)


def test_submodules_have_their_commits_and_other_changes_are_named(made, tmp_path, git, caplog):
    git(tmp_path, "init", "-q", "inner")
    git(tmp_path / "inner", "commit", "-q", "--allow-empty", "-m", "a")
    add = ("-c", "protocol.file.allow=always", "submodule", "--quiet", "add")
    made.git(*add, str(tmp_path / "inner"), "lib")
    made.git("commit", "-qm", "c")
    (made.path / "lib" / "lib.py").write_text("1\n")
    git(made.path / "lib", "add", "lib.py")
    assert not snapshot(made.path).dirty
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warnings == ["not measured: changes in submodule lib: commit them there"]

    git(made.path / "lib", "commit", "-qam", "b")
    taken = snapshot(made.path)
    assert taken.dirty
    lib = made.git("rev-parse", f"{taken.commit}:lib")
    assert lib == git(made.path / "lib", "rev-parse", "HEAD")
