"""Provenance of the running code."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexq_bench.errors import InfrastructureError
from flexq_bench.repository.provenance import commit_at, commit_of, source_hash


@pytest.fixture
def tree(tmp_path: Path, git) -> Path:
    """A repository of two commits with the packages in it."""
    for package in ("flexq_bench", "kernels", "workloads", "db"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / ".gitignore").write_text("*.log\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    (tmp_path / "kernels" / "gemm.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "second")
    return tmp_path


def test_clean_tree_is_its_head_commit(tree, git):
    commit = commit_of(tree)

    assert commit.sha == git(tree, "rev-parse", "HEAD")
    assert commit.parents == (git(tree, "rev-parse", "HEAD^"),) == (commit.parent,)
    assert (commit.subject, commit.dirty) == ("second", False)
    assert commit.committed_at.endswith("+00:00")


def test_any_commit_is_described_like_head(tree, git):
    sha = git(tree, "rev-parse", "HEAD^")
    (tree / "kernels" / "gemm.py").write_text("x = 2\n")
    git(tree, "stash")
    git(tree, "checkout", "-q", sha)
    was = commit_of(tree)
    git(tree, "checkout", "-q", "-")
    git(tree, "stash", "pop")

    assert commit_at(tree, sha) == was


def test_lost_commit_is_an_infrastructure_error(tree):
    with pytest.raises(InfrastructureError, match="git has no information about 0000"):
        commit_at(tree, "0" * 40)


def test_invalid_utf8_in_a_subject_can_be_stored(tree, git):
    # As a program may write it; `git commit` would take the byte for Latin-1.
    raw = git(tree, "cat-file", "commit", "HEAD").encode().replace(b"second", b"caf\xe9")
    (tree / ".git" / "raw").write_bytes(raw)
    sha = git(tree, "hash-object", "-w", "-t", "commit", "--literally", ".git/raw")
    git(tree, "reset", "-q", "--hard", sha)

    assert commit_of(tree).subject.encode() == b"caf?"


def test_root_commit_has_no_parent(tree, git):
    git(tree, "checkout", "-q", "HEAD^")

    assert (commit_of(tree).parent, commit_of(tree).parents) == (None, ())


@pytest.mark.parametrize(
    ("path", "dirty"),
    [
        ("kernels/__init__.py", True),
        ("kernels/new.cu", True),
        ("kernels/run.log", False),
        ("notes.txt", False),
    ],
)
def test_changed_file_or_new_package_file_makes_a_tree_dirty(tree, path, dirty):
    (tree / path).write_text("changed")

    assert commit_of(tree).dirty is dirty


def test_commit_of_a_shallow_clone_names_its_parent(tree, tmp_path_factory, git):
    clone = tmp_path_factory.mktemp("clone")
    git(tree, "clone", "-q", "--depth", "1", f"file://{tree}", str(clone))

    commit = commit_of(clone)

    assert (commit.sha, commit.parent) == tuple(git(tree, "rev-parse", "HEAD", "HEAD^").split())


def test_installed_package_is_named_by_its_source_hash(tmp_path):
    (tmp_path / "flexq_bench" / "kernels").mkdir(parents=True)
    source = tmp_path / "flexq_bench" / "kernels" / "gemm.cu"
    source.write_text("a")
    before = commit_of(tmp_path)
    source.write_text("b")

    assert before.sha.startswith("pkg-")
    assert (before.parent, before.topo_order, before.dirty) == (None, None, False)
    assert commit_of(tmp_path).sha != before.sha
    assert before.sha.split("-")[1:] != [""]
    assert commit_of(tmp_path).sha.endswith(source_hash(tmp_path))


def test_package_inside_another_repository_is_not_its_commit(tree):
    installed = tree / ".venv"
    (installed / "flexq_bench").mkdir(parents=True)
    (installed / "flexq_bench" / "__init__.py").write_text("")

    assert commit_of(installed).sha.startswith("pkg-")


@pytest.mark.parametrize(
    "path",
    [
        "kernels/csrc/gemm.cu",
        "kernels/cuda/timed_shapes/one.json",
        "workloads/suites/smoke.toml",
        "flexq_bench/measure/clocks.py",
        "db/writer.py",
    ],
)
def test_source_hash_covers_code_that_affects_results(tmp_path, path):
    source = tmp_path / "flexq_bench" / path
    source.parent.mkdir(parents=True)
    source.write_text("a")
    before = source_hash(tmp_path)
    source.write_text("b")

    assert source_hash(tmp_path) != before
