"""Commits that attack the process that checks them out, builds them and reads their files."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from flexq_bench.db.lines import KnownHistory
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.measure.sandbox import building, obstacle
from flexq_bench.repository import git
from flexq_bench.repository.ancestry import read_history
from flexq_bench.repository.benchmark_files import write_benchmarks
from flexq_bench.repository.git import GitError
from flexq_bench.repository.project import BenchmarkFiles, open_project
from flexq_bench.repository.project_builds import built_tree
from flexq_bench.repository.provenance import commit_at, commits_at
from flexq_bench.repository.worktrees import worktree
from tests.repository.conftest import FILE, TOML


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("option", ["smudge", "process"])
def test_filter_of_the_clone_runs_no_file_of_a_commit(made, tmp_path, option):
    script = made.path / "a_script"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    script.chmod(0o755)
    (made.path / ".gitattributes").write_text("*.txt filter=format\n")
    made.commit(**{"file.txt": "text\n"})
    made.git("config", f"filter.format.{option}", "./a_script")
    made.git("config", "filter.format.required", "true")
    plain = ("git", "-C", str(made.path), "worktree", "add", str(tmp_path / "plain"))
    subprocess.run(plain, capture_output=True, check=False)
    (tmp_path / "ran").unlink()  # git alone runs it

    with worktree(made.path, "HEAD") as folder:
        assert (folder / "file.txt").read_text() == "text\n"

    assert not (tmp_path / "ran").exists()


def test_folder_of_a_commit_is_no_repository_of_its_own(made):
    inner = made.path / "inner"
    made.git("init", "-q", "--bare", str(inner))
    made.git("-C", str(inner), "config", "core.bare", "false")
    made.git("-C", str(inner), "config", "core.worktree", "..")
    (inner / FILE).write_text(TOML)

    with pytest.raises(UsageError, match="bare repository"):
        open_project(str(inner))


@pytest.mark.parametrize("kind", ["link to a folder", "link to a file", "file"])
def test_benchmarks_are_written_through_nothing_of_a_commit(tmp_path, kind):
    outside, checkout = tmp_path / "outside", tmp_path / "checkout"
    outside.mkdir()
    checkout.mkdir()
    (outside / "k.py").write_text("theirs")
    if kind == "link to a folder":
        (checkout / "bench").symlink_to(outside)
    elif kind == "link to a file":
        (checkout / "bench").mkdir()
        (checkout / "bench" / "k.py").symlink_to(outside / "k.py")
    else:
        (checkout / "bench").write_text("no folder")

    write_benchmarks(BenchmarkFiles("base", "", {"bench/k.py": b"base's"}, {}), checkout)

    assert (checkout / "bench" / "k.py").read_text() == "base's"
    assert (outside / "k.py").read_text() == "theirs"


@pytest.mark.parametrize(
    "command",
    [
        "mkfifo pyproject.toml",
        "ln -s /dev/zero pyproject.toml",
        "mkfifo setup.py",
        "mkdir setup.cfg",
        "printf '%040000d' 0 | tr 0 '[' | sed 's/^/project = /' >pyproject.toml",
        "mkdir -p ../site/a.dist-info && mkfifo ../site/a.dist-info/direct_url.json",
        "mkdir -p ../site/a.dist-info && ln -s /dev/zero ../site/a.dist-info/direct_url.json",
    ],
)
def test_what_a_build_leaves_does_not_block_its_reader(made, command):
    (made.path / FILE).write_text(f'{TOML}[build]\ncommand = """{command}"""\n')
    sha = made.commit()

    built = built_tree(open_project(str(made.path)), sha)

    assert built.place.distribution == ""
    assert str(built.folder) in built.environment()["PYTHONPATH"].split(os.pathsep)


@pytest.mark.parametrize("kind", ["none", "namespaces"])
def test_folders_of_any_depth_are_owned_and_removed(made, kind):
    if obstacle(kind):
        pytest.skip("this machine allows no sandbox of this kind")
    deep = "import os; [(os.mkdir(a), os.chdir(a)) for a in [str(10**99)] * 1500]"
    (made.path / "deep.py").write_text(deep)
    (made.path / FILE).write_text(f'{TOML}[build]\ncommand = "python deep.py"\n')
    sha = made.commit()

    with clean_environment() as variables:
        isolated = partial(building, variables, kind)
        project = open_project(str(made.path))
        built = built_tree(project, sha, variables=variables, isolated=isolated)
        home = Path(variables["HOME"])
        (top,) = built.folder.glob("1*")
        assert top.owner() == Path(__file__).owner()

    assert not home.exists()


@pytest.mark.parametrize("name", ['"a\\u0000b"', '"a=b"', "7", '["a"]'])
@pytest.mark.parametrize("dynamic", ['["version"]', "7"])
def test_invalid_package_name_reaches_no_environment(made, name, dynamic):
    table = f"[project]\nname = {name}\ndynamic = {dynamic}\n"
    (made.path / "pyproject.toml").write_text(table)
    (made.path / FILE).write_text(f'{TOML}[build]\ncommand = "true"\n')
    sha = made.commit()

    assert built_tree(open_project(str(made.path)), sha).place.distribution == ""


@pytest.mark.parametrize("name", ["..", ".git", ".GIT"])
@pytest.mark.parametrize("mode", ["040000 tree", "160000 commit"])
def test_tree_that_leaves_its_folder_is_refused(made, tmp_path, name, mode):
    sha = made.git("rev-parse", "HEAD" if "commit" in mode else "HEAD^{tree}")
    project = made.git("hash-object", "-w", FILE)
    entries = f"{mode} {sha}\t{name}\n100644 blob {project}\t{FILE}\n"
    tree = subprocess.run(
        ("git", "-C", str(made.path), "mktree", "--missing"),
        input=entries, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    commit = made.git("commit-tree", "-m", "hostile", tree)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(InfrastructureError):
        built_tree(open_project(str(made.path)), commit)

    assert {*tmp_path.iterdir()} - {*before} <= {tmp_path / "cache"}


@pytest.mark.parametrize("leaf", ["file", "empty folder", "large file"])
def test_commit_of_a_few_objects_that_expand_is_refused(made, monkeypatch, leaf):
    content = {"file": "text", "empty folder": "", "large file": "x" * (1 << 20)}[leaf]
    (made.path / "leaf").write_text(content)
    blob = made.git("hash-object", "-w", "leaf")
    tree = _tree(made, f"100644 blob {blob}\tleaf\n" * (leaf != "empty folder"))
    for _ in range(3 if leaf == "large file" else 10):
        tree = _tree(made, "".join(f"040000 tree {tree}\t{name}\n" for name in "abcdefghij"))
    monkeypatch.setattr(git, "_MAX_ENTRIES", 1 << 14)
    monkeypatch.setattr(git, "_MAX_BYTES", 100 << 20)
    commit = made.git("commit-tree", "-m", "many", tree)

    with pytest.raises(GitError, match="more than"), worktree(made.path, commit):
        pass


def _tree(made, entries):
    command = ["git", "-C", str(made.path), "mktree"]
    return subprocess.run(
        command, input=entries, capture_output=True, text=True, check=True
    ).stdout.strip()


# Of the ends of a line, git keeps all but the newline in names.
ENDS = ("\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\u2028", "\u2029")


@pytest.mark.parametrize("end", ENDS, ids=ascii)
def test_author_is_neither_a_parent_nor_a_time(made, end):
    first = made.git("rev-parse", "HEAD")
    lines = f"a{end}parent {'f' * 40}{end}2001-01-01T00:00:00+00:00{end}b"
    made.git("-c", f"user.name={lines}", "commit", "-q", "--allow-empty", "-m", f"x{end}parent y")
    head = made.git("rev-parse", "HEAD")

    commit = commit_at(made.path, head)

    assert git.parents_of(made.path, head) == commit.parents == (first,)
    assert commit.author == lines
    assert not commit.committed_at.startswith("2001")
    assert commits_at(made.path, [head])[head].author == lines


@pytest.mark.parametrize("end", ENDS[-3:], ids=ascii)
def test_any_name_of_a_branch_and_a_tag_is_read(made, end):
    head = made.git("rev-parse", "HEAD")
    for words in (("branch",), ("tag",), ("tag", "-m", "annotated")):
        made.git(*words, f"{words[-1]}{end}2 {head}".replace(" ", ""))

    history = read_history(made.path, [head], "acme", KnownHistory("", {}, (), ()))

    assert f"branch{end}2{head}" in history.ancestry.tips
    assert {f"tag{end}2{head}", f"annotated{end}2{head}"} == git.commits_of_tags(made.path).keys()


def test_subject_of_a_commit_is_bounded(made):
    (made.path / "message").write_text("a" * 1_000_000)
    made.git("commit", "-q", "--allow-empty", "--file", "message")

    assert len(commit_at(made.path, made.git("rev-parse", "HEAD")).subject) <= 1000


@pytest.mark.parametrize("date", ["253402300800 +0000", "1 +99999", "abc +0000", "-5 +0000"])
def test_commit_of_any_time_is_read(made, date):
    tree = made.git("rev-parse", "HEAD^{tree}")
    people = f"author a <a@b> {date}\ncommitter a <a@b> {date}"
    text = f"tree {tree}\n{people}\n\nmessage\n"
    command = (
        "git",
        "-C",
        made.path,
        "hash-object",
        "-t",
        "commit",
        "-w",
        "--stdin",
        "--literally",
    )
    head = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    made.git("branch", "other", head.strip())

    commit = commit_at(made.path, head.strip())

    assert (commit.author, commit.subject) == ("a", "message")
    read_history(made.path, [head.strip()], "acme", KnownHistory("", {}, (), ()))
