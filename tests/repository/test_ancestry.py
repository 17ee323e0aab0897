"""What a clone tells of its history."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from flexq_bench.db.ancestry import KnownHistory, Tip
from flexq_bench.repository.ancestry import measured_branch, read_history

NOTHING = KnownHistory("", {}, (), ())
AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def clone(tmp_path, git):
    """A repository with three commits on the branch main."""
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for subject in ("first", "second", "third"):
        git(folder, "commit", "-q", "--allow-empty", "-m", subject)
    return folder


@pytest.fixture
def shas(clone, git):
    return git(clone, "rev-list", "--reverse", "main").split()


def test_only_parents_that_are_not_stored_are_read(clone, shas):
    known = KnownHistory("main", {"main": Tip(shas[1], AT)}, (shas[1],), ())

    assert read_history(clone, [shas[2]], "p", NOTHING).ancestry.parents == {
        shas[0]: (),
        shas[1]: (shas[0],),
        shas[2]: (shas[1],),
    }
    assert read_history(clone, [shas[2]], "p", known).ancestry.parents == {shas[2]: (shas[1],)}


@pytest.mark.parametrize(
    ("branches", "checked_out", "known", "expected"),
    [
        (("main", "feature"), "feature", "", "main"),
        (("develop", "feature"), "develop", "", "develop"),
        (("develop", "feature"), "feature", "develop", "develop"),
        (("develop",), "", "", "develop"),
        (("develop", "feature"), "", "", ""),
    ],
)
def test_main_branch_without_a_remote(clone, git, branches, checked_out, known, expected):
    git(clone, "checkout", "-q", "--detach")
    git(clone, "branch", "-q", "-D", "main")
    for name in branches:
        git(clone, "branch", "-q", name)
    if checked_out:
        git(clone, "checkout", "-q", checked_out)
    stored = KnownHistory(known, {}, (), ())

    history = read_history(clone, [git(clone, "rev-parse", "HEAD")], "p", stored)

    assert history.ancestry.main == expected


def test_main_branch_is_the_head_of_the_remote(clone, tmp_path, git):
    git(clone, "checkout", "-q", "-b", "trunk-of-theirs")
    git(tmp_path, "clone", "-q", str(clone), "copy")
    git(tmp_path / "copy", "checkout", "-q", "-b", "main", "origin/main")

    history = read_history(tmp_path / "copy", [git(clone, "rev-parse", "HEAD")], "p", NOTHING)

    assert history.ancestry.main == "trunk-of-theirs"


def test_missing_object_is_noted_and_the_commit_keeps_its_parent(clone, shas):
    (clone / ".git" / "objects" / shas[1][:2] / shas[1][2:]).unlink()

    history = read_history(clone, [shas[2]], "p", NOTHING)

    assert "can't be read" in history.note
    assert history.ancestry.parents == {shas[2]: (shas[1],)}


def test_deleted_branches_are_those_that_a_full_clone_lacks(clone, tmp_path, git, shas):
    git(tmp_path, "clone", "-q", "--single-branch", f"file://{clone}", "single")
    known = KnownHistory("main", {"gone": Tip(shas[1], AT)}, (), ())

    def deleted(folder):
        return read_history(folder, [shas[2]], "p", known).ancestry.deleted

    assert (deleted(clone), deleted(tmp_path / "single")) == (("gone",), ())


def test_branch_of_ci_job_is_source_of_pull_request(clone, monkeypatch, shas):
    assert measured_branch(clone, shas[2]) == "main"
    assert measured_branch(clone, shas[1]) == ""
    monkeypatch.setenv("GITHUB_REF", "refs/pull/7/merge")
    monkeypatch.setenv("GITHUB_HEAD_REF", "feature")
    assert measured_branch(clone, shas[2]) == "feature"
