"""Comparison of commits by name: checkouts, refusals, and cleanup."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest

from flexq_bench.errors import BrokenRevisionError, UsageError
from flexq_bench.measure.ab import InterleaveRules, compare_commits
from flexq_bench.measure.ab.revisions import commits_between, resolve_pair
from flexq_bench.verdicts import Verdict
from flexq_bench.workloads.case import Case

CASE = Case.from_key("flexq-w6a6 gemm cold m1n64k64")
RULES = InterleaveRules(processes=5, looks=1, timeout_s=20.0)


@pytest.fixture
def compare(repository, command):
    def run(base, head, path=None, **options):
        where = path or repository.path
        found = compare_commits(
            where, base, head, [CASE], device="cpu", rules=RULES, **{"command": command} | options
        )
        (result,) = found
        return result

    return run


@pytest.fixture
def worktrees(cache, repository):
    """Remaining worktrees, in our folder and in git's list."""

    def left():
        folder = cache / "worktrees"
        listed = repository.git("worktree", "list").splitlines()[1:]
        return [*(folder.iterdir() if folder.exists() else ()), *listed]

    return left


def test_each_commit_runs_its_own_code(repository, compare, worktrees):
    base = repository.commit(us=100)
    head = repository.commit(us=104)

    found = compare(base[:9], "main")

    assert (found.base, found.head) == (base, head)
    assert found.confirmation.verdict is Verdict.SLOWER
    assert found.confirmation.log_ratio == pytest.approx(math.log(1.04))
    assert worktrees() == []


def test_worktrees_are_removed_if_a_worker_does_not_start(repository, compare, worktrees):
    base = repository.commit(us=100)
    repository.commit(die_at="describe")

    with pytest.raises(BrokenRevisionError, match="no module named gone"):
        compare(base, "main")

    assert worktrees() == []


def test_worktrees_are_removed_after_ctrl_c(repository, compare, worktrees):
    base = repository.commit(us=100)

    def interrupt(_case, _block):
        assert len(worktrees()) == 2  # one, in both
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(base, base, on_block=interrupt)

    assert worktrees() == []


def test_dot_is_the_working_tree_with_new_files(repository, compare):
    base = repository.commit(us=100)
    (repository.path / "flexq_bench" / "new.py").write_text("x = 1\n")
    status = repository.git("status", "--porcelain")

    found = compare("HEAD", ".")

    assert (found.base, found.head) == (base, f"{base}-dirty")
    assert repository.git("status", "--porcelain") == status
    assert "new.py" in repository.git(
        "ls-tree", "-r", "--name-only", resolve_pair(repository.path, base, ".")[1].commit
    )


def test_dot_without_changes_is_the_commit(repository):
    head = repository.commit(us=100)

    assert resolve_pair(repository.path, head, ".")[1].name == head


def test_checked_out_name_with_local_changes_is_refused(repository):
    base = repository.commit(us=100)
    head = repository.commit(us=101)
    (repository.path / "flexq_bench" / "new.py").write_text("x = 1\n")

    for written in ("HEAD", "main", head[:8]):
        with pytest.raises(UsageError, match=r"the working tree has changes that .* compare them"):
            resolve_pair(repository.path, base, written)

    assert resolve_pair(repository.path, base, head)[1].commit == head


def test_unknown_revision_is_refused(repository, compare):
    repository.commit(us=100)

    with pytest.raises(UsageError, match=r"no revision 'mian'.*main"):
        compare("HEAD", "mian")


def test_shallow_clone_without_the_base_is_refused(repository, compare, tmp_path):
    base = repository.commit(us=100)
    repository.commit(us=100)
    shallow = tmp_path / "shallow"
    subprocess.run(
        ["git", "clone", "-q", "--depth", "1", f"file://{repository.path}", str(shallow)],
        check=True,
    )

    with pytest.raises(UsageError, match="shallow clone: git fetch --unshallow"):
        compare(base, "HEAD", path=shallow)


def test_folder_outside_of_git_is_refused(compare, tmp_path):
    (tmp_path / "plain").mkdir()

    with pytest.raises(UsageError, match="is not in a git repository"):
        compare("a", "b", path=tmp_path / "plain")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("README", "is not a commit of FlexQ Bench"),
        ("flexq_bench/__init__.py", "from before commits could be compared"),
    ],
)
def test_commit_without_a_worker_is_refused(repository, compare, file, message):
    (repository.path / "flexq_bench").mkdir()
    (repository.path / file).touch()
    repository.git("add", ".")
    repository.git("commit", "-q", "-m", "first")
    other = repository.git("rev-parse", "HEAD")
    repository.commit(us=100)

    with pytest.raises(UsageError, match=message):
        compare(other, "HEAD")


LAYOUTS = ("flexq_bench/interleave", "flexq_bench/measure/ab")


@pytest.fixture
def with_worker(repository):
    """Commit a tree whose only A/B worker lies in a folder, and answers as told."""

    def commit(folder: str, **behaviour: object) -> str:
        shutil.rmtree(repository.path / "flexq_bench", ignore_errors=True)
        repository.write(**behaviour)
        shutil.rmtree(repository.path / "flexq_bench" / "measure")
        package = repository.path / folder
        package.mkdir(parents=True)
        for inner in (package, package.parent):
            (inner / "__init__.py").touch()
        shutil.copy(Path(__file__).with_name("fake_worker.py"), package / "worker.py")
        repository.git("add", "--all", ".")
        repository.git("commit", "-q", "-m", folder)
        return repository.git("rev-parse", "HEAD")

    return commit


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        LAYOUTS,
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in (LAYOUTS[::-1], LAYOUTS[:1] * 2)
        ),
    ],
)
def test_older_commits_run_the_worker_of_their_layout(compare, with_worker, layouts):
    base = with_worker(layouts[0], us=100)
    head = with_worker(layouts[1], us=104)

    found = compare(base, head, command=None)

    assert found.detail == ""
    assert found.confirmation.verdict is Verdict.SLOWER


def test_commits_between_change_code_and_are_oldest_first(repository):
    good = repository.commit(us=100)
    first = repository.commit(us=101)
    (repository.path / "README").write_text("words\n")
    repository.git("add", ".")
    repository.git("commit", "-q", "-m", "words")
    last = repository.commit(us=102)

    assert commits_between(repository.path, good, last) == [first, last]
    with pytest.raises(UsageError, match="is not an ancestor of"):
        commits_between(repository.path, last, good)
