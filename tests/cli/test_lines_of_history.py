"""Histories follow the branches of a repository: rebases, pull requests, shallow clones."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta

import pytest

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def origin(tmp_path, git):
    """A repository with the branch main, without commits."""
    folder = tmp_path / "origin"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    return folder


@pytest.fixture
def commit(origin, git, monkeypatch):
    """commit("text"): a new commit, one day after the last; its id."""
    days = iter(range(1000))

    def make(subject):
        at = (START + timedelta(days=next(days))).isoformat()
        monkeypatch.setenv("GIT_COMMITTER_DATE", at)
        monkeypatch.setenv("GIT_AUTHOR_DATE", at)
        git(origin, "commit", "-q", "--allow-empty", "-m", subject)
        return git(origin, "rev-parse", "HEAD")

    return make


@pytest.fixture
def measured(cli, tmp_path, origin):
    """measured(sha, 100.0): imports a result of a commit; returns what was printed on stderr."""
    days = iter(range(1000))

    def give(sha, us, *options, repository=None):
        path = tmp_path / "result.csv"
        path.write_text(f"benchmark,value,gpu\ngemm,{us},H200\n")
        at = START + timedelta(hours=next(days))
        ran = cli(
            *("db", "import", "--format", "csv", "--project", "p", "--commit", sha),
            *("--time", at.isoformat(), "--repository", str(repository or origin)),
            *(*options, str(path)),
        )
        assert ran.code == 0, ran.err
        return ran.err

    return give


@pytest.fixture
def main_line(database):
    """main_line(): the commits of the only series on its main line."""

    def read(branch=None):
        with open_database(str(database), read_only=True) as opened, opened.session() as session:
            (series,) = queries.project_series(session)
            points = queries.series_history(session, series.id, branch=branch)
            return [point.commit for point in points]

    return read


def noisy(level, seed):
    return level * (1 + 0.002 * random.Random(seed).gauss(0, 1))


def alerts_of(cli):
    return json.loads(cli("alerts", "list", "--state", "all", "--json").out)


@pytest.mark.slow
def test_rewritten_commits_leave_the_history_and_their_alert_ends(
    cli, origin, git, commit, measured, main_line, database
):
    old = [commit(f"change {i}") for i in range(33)]
    for seed, sha in enumerate(old):
        measured(sha, noisy(100 if seed < 30 else 120, seed))
    assert [(alert["bad"]["sha"], alert["state"]) for alert in alerts_of(cli)] == [(old[30], "new")]
    git(origin, "reset", "-q", "--hard", old[29])
    new = [commit(f"rewritten {i}") for i in range(3)]
    new += [commit(f"later {i}") for i in range(4)]
    for seed, sha in enumerate(new):
        measured(sha, noisy(100, 40 + seed))

    assert main_line() == [*old[:30], *new]
    with open_database(str(database), read_only=True) as opened, opened.session() as session:
        (note,) = queries.history_notes(session, "p", since=START)
    assert "no branch reaches 3 measured commits any more" in note
    (alert,) = alerts_of(cli)
    assert alert["state"] == "ended"
    assert alert["note"].startswith(f"{old[30][:10]} is no longer on the line of history")


def test_results_of_a_pull_request_do_not_touch_main(cli, origin, git, commit, measured, main_line):
    first = [commit(f"change {i}") for i in range(8)]
    git(origin, "checkout", "-q", "-b", "feature")
    side = [commit(f"feature {i}") for i in range(3)]
    git(origin, "checkout", "-q", "main")
    later = [commit(f"later {i}") for i in range(4)]
    for seed, sha in enumerate((*first, *side, *later)):
        measured(sha, noisy(120 if sha in side else 100, seed))

    assert main_line() == [*first, *later]
    assert main_line("feature") == [*first, *side]
    assert alerts_of(cli) == []


def test_deleted_branch_keeps_its_line(origin, git, commit, measured, main_line):
    first = commit("first")
    git(origin, "checkout", "-q", "-b", "feature")
    side = commit("feature")
    measured(side, 120)
    git(origin, "checkout", "-q", "main")
    git(origin, "branch", "-q", "-D", "feature")
    squashed = commit("squashed")
    measured(first, 100)
    measured(squashed, 120)

    assert main_line() == [first, squashed]
    assert main_line("feature") == [first, side]


def test_merged_commits_stay_on_the_line_of_their_branch(origin, git, commit, measured, main_line):
    first = commit("first")
    git(origin, "checkout", "-q", "-b", "feature")
    side = commit("feature")
    git(origin, "checkout", "-q", "main")
    second = commit("second")
    for sha in (first, side, second):
        measured(sha, 100)
    assert main_line() == [first, second]

    git(origin, "merge", "-q", "--no-ff", "-m", "merge", "feature")
    merge = git(origin, "rev-parse", "HEAD")
    measured(merge, 100)

    assert main_line() == [first, second, merge]
    assert main_line("feature") == [first, side]


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_shallow_clones_order_commits_by_time_with_one_note(
    tmp_path, origin, git, commit, measured, main_line, every
):
    shas, notes = [], []
    for number in range(8):
        sha = commit(f"change {number}")
        if number % every:
            continue
        clone = tmp_path / f"clone {number}"
        git(tmp_path, "clone", "-q", "--depth", "1", f"file://{origin}", str(clone))
        notes.append(measured(sha, 100, repository=clone))
        shas.append(sha)

    assert main_line() == shas
    assert all(note.count("is a shallow clone") == 1 for note in notes)


def test_late_result_of_a_shallow_clone_gets_its_place(
    tmp_path, origin, git, commit, measured, main_line
):
    clones = []
    for number in range(3):
        clones.append((commit(f"change {number}"), tmp_path / f"clone {number}"))
        git(tmp_path, "clone", "-q", "--depth", "1", f"file://{origin}", str(clones[-1][1]))
    for place in (0, 2, 1):
        measured(clones[place][0], 100, repository=clones[place][1])

    assert main_line() == [sha for sha, _ in clones]


def test_new_root_follows_the_old_line(origin, git, commit, measured, main_line, database):
    old = [commit(f"change {i}") for i in range(3)]
    for sha in old:
        measured(sha, 100)
    git(origin, "checkout", "-q", "--orphan", "new")
    root = commit("new root")
    git(origin, "branch", "-q", "-M", "new", "main")
    measured(root, 100)
    later = commit("later")
    measured(later, 100)

    assert main_line() == [*old, root, later]
    with open_database(str(database), read_only=True) as opened, opened.session() as session:
        (note,) = queries.history_notes(session, "p", since=START)
    assert f"has a new root, {root[:10]}: its 3 measured commits from before are joined" in note


def test_older_clone_does_not_move_the_line_back(
    tmp_path, origin, git, commit, measured, main_line
):
    first = commit("first")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(origin), str(clone))
    second = commit("second")
    measured(second, 100)
    measured(first, 100, repository=clone)

    assert main_line() == [first, second]


@pytest.mark.slow
def test_reruns_of_a_commit_are_one_piece_of_evidence(cli, commit, measured):
    for seed in range(30):
        measured(commit(f"change {seed}"), noisy(100, seed))
    slow = commit("measured three times")
    for seed in range(3):
        measured(slow, noisy(110, seed))
    assert alerts_of(cli) == []

    for seed in range(2):
        measured(commit(f"later {seed}"), noisy(110, 30 + seed))

    assert [alert["bad"]["sha"] for alert in alerts_of(cli)] == [slow]


def test_only_measured_branch_is_main_line_until_main_is(origin, git, commit, measured, main_line):
    first = commit("first")
    git(origin, "checkout", "-q", "-b", "feature")
    side = commit("feature")
    measured(side, 100)
    assert main_line() == [side] == main_line("feature")

    measured(first, 100)
    assert main_line() == [first]
    assert main_line("feature") == [first, side]


def test_pull_request_of_ci_job_is_a_line_without_clone(cli, tmp_path, main_line, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("benchmark,value,gpu\ngemm,100,H200\n")
    for branch, sha in (("main", "1" * 40), ("feature", "2" * 40), ("main", "3" * 40)):
        monkeypatch.setenv("GITHUB_REF", f"refs/heads/{branch}" if branch == "main" else "")
        monkeypatch.setenv("GITHUB_HEAD_REF", "" if branch == "main" else branch)
        ran = cli("db", "import", "--format", "csv", "--project", "p", "--commit", sha, "a.csv")
        assert ran.code == 0, ran.err

    assert main_line() == ["1" * 40, "3" * 40]
    assert main_line("feature") == ["2" * 40]
