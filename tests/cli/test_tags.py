"""`flexq-bench db tags`: releases of the current git tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexq_bench.db.engine import open_database
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.writer import Writer


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git) -> Path:
    """A repository with a plain and an annotated tag, and a tag of no commit, that one is in."""
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.chdir(root)
    git(root, "init", "-q", "-b", "main")
    git(root, "commit", "-q", "--allow-empty", "-m", "first")
    git(root, "tag", "v1.0")
    git(root, "commit", "-q", "--allow-empty", "-m", "second")
    git(root, "tag", "-a", "-m", "the second one", "v2.0")
    git(root, "tag", "a-tree", git(root, "rev-parse", "HEAD^{tree}"))
    return root


def store(database: Path, *shas: str) -> None:
    with open_database(str(database)) as opened, opened.session() as session:
        for order, sha in enumerate(shas):
            Writer(session).commit(CommitInfo(sha, None, order, dirty=False))


def test_tags_of_measured_commits_are_stored_once(tree: Path, database: Path, cli: Any, git):
    store(database, git(tree, "rev-parse", "HEAD~1"), git(tree, "rev-parse", "HEAD"))

    first = cli("db", "tags", "--json")
    again = cli("db", "tags")

    assert json.loads(first.out)["changed"] == ["v1.0", "v2.0"]
    assert "2 tags, none of them new" in again.out


def test_tags_outside_of_repository_are_usage_error(
    tmp_path: Path, monkeypatch, database: Path, cli: Any
):
    store(database, "f" * 40)
    monkeypatch.chdir(tmp_path)

    assert "not a git repository" in cli("db", "tags").error
