"""Commits as files, and the clone that another machine makes of them."""

from __future__ import annotations

import shutil

import pytest

from flexq_bench.errors import InfrastructureError
from flexq_bench.repository.commit_packs import clone_with, write_commit
from flexq_bench.repository.git import run_git
from flexq_bench.repository.worktrees import worktree


@pytest.fixture
def packed_commits(tmp_path, git):
    """Two commits as files; their repository, which has a submodule, is gone."""
    inner, root = tmp_path / "inner", tmp_path / "root"
    for folder in (inner, root):
        folder.mkdir()
        git(folder, "init", "--quiet")
    (inner / "header.h").write_text("inner")
    git(inner, "add", ".")
    git(inner, "commit", "--quiet", "-m", "inner")
    git(root, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "sub")
    packs = {}
    for text in ("one", "two"):
        (root / "file").write_text(text)
        git(root, "add", ".")
        git(root, "commit", "--quiet", "-m", text)
        sha = git(root, "rev-parse", "HEAD")
        packs[sha] = tmp_path / sha
        packs[sha].mkdir()
        write_commit(root, sha, packs[sha])
    shutil.rmtree(root)
    shutil.rmtree(inner)
    return packs


def test_clone_has_the_commits_and_their_submodules(packed_commits, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    clone = clone_with(packed_commits, tmp_path / "clones")

    texts = []
    for sha in packed_commits:
        with worktree(clone, sha) as folder:
            texts.append((folder / "file").read_text())
    assert texts == ["one", "two"]
    submodule = run_git(clone, "ls-tree", next(iter(packed_commits)), "sub").stdout.split()[2]
    assert run_git(clone / "sub", "show", f"{submodule}:header.h").stdout == "inner"
    assert clone_with(packed_commits, tmp_path / "clones") == clone


def test_pack_of_another_commit_is_refused(packed_commits, tmp_path):
    (_, folder), (second, _) = packed_commits.items()

    with pytest.raises(InfrastructureError, match="and not"):
        clone_with({second: folder}, tmp_path / "clones")

    assert not list((tmp_path / "clones").iterdir())
