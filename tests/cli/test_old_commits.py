"""Today's benchmarks on the commits of a library that has none of our files."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from flexq_bench.ci.backfill import history_commits, history_order
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import Record
from flexq_bench.errors import UsageError
from flexq_bench.repository.benchmark_files import OVERLAY, project_with_benchmarks
from flexq_bench.repository.project import FILE
from flexq_bench.repository.project_builds import built_tree

COMMITS, SLOW = 120, 77  # the number of commits; the one that does everything four times
BROKEN = 89  # the library can't be imported
LIBRARY = '''"""Quantized layers, revision {revision}."""

import torch


def linear(x, weight, out):
    for _ in range({times}):
        out.copy_(torch.mm(x.float(), weight.T))
'''
KERNELS = """import torch
from helper import prepared
from flexq_bench.api import linear_kernel
from tinyquant import linear


@linear_kernel("w8a16", weight="int8/128", prepare_weight=prepared)
def w8a16(x, w, out):
    linear(x, w, out)
"""
HELPER = """def prepared(codes, scales):
    return codes.float() * scales.float().repeat_interleave(128, 1)[:, : codes.shape[1]]
"""
PROJECT = """version = 1
name = "tinyquant"
kernels = ["kernels.py"]
suite = "suite.toml"
"""
SUITE = """description = "a layer"
[[group]]
kernels = ["tinyquant.*"]
m = "16"
shapes = ["512x1024"]
"""
FILES = {"kernels.py": KERNELS, "helper.py": HELPER, FILE: PROJECT, "suite.toml": SUITE}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A repository of 120 commits without our files, made by git fast-import."""
    root = tmp_path_factory.mktemp("theirs") / "tinyquant"
    subprocess.run(["git", "init", "-q", "-b", "main", str(root)], check=True)
    lines = []
    for number in range(COMMITS):
        text = LIBRARY.format(revision=number, times=4 if number >= SLOW else 1)
        text += "import no_such_module\n" if number == BROKEN else ""
        lines += [
            "commit refs/heads/main",
            f"committer Ada <ada@example.org> {1_700_000_000 + 86_400 * number} +0000",
            f"data {len(f'Change {number}')}\nChange {number}",
            f"M 100644 inline tinyquant/__init__.py\ndata {len(text)}\n{text}",
        ]
    stream = "\n".join(lines).encode()
    subprocess.run(["git", "-C", str(root), "fast-import", "--quiet"], input=stream, check=True)
    subprocess.run(["git", "-C", str(root), "reset", "-q", "--hard"], check=True)
    subprocess.run(["git", "-C", str(root), "tag", "v1.0", f"HEAD~{COMMITS - 15}"], check=True)
    return root


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))


def sha_of(library, revision):
    run = subprocess.run(
        ["git", "-C", str(library), "rev-parse", revision],
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip()


@pytest.mark.parametrize(
    ("measured", "order"),
    [
        ([False] * 9, [8, 0, 4, 6, 2, 7, 5, 3, 1]),
        ([True, False, False, False, False, True], [2, 3, 4, 1]),
        ([False], [0]),
        ([True, True], []),
        ([], []),
    ],
)
def test_history_begins_at_its_ends_and_halves_gaps(measured, order):
    got = list(history_order(measured))

    assert sorted(got) == [i for i, is_measured in enumerate(measured) if not is_measured]
    assert got[:2] == order[:2]
    known = [i for i, is_measured in enumerate(measured) if is_measured]
    for index in got:
        ends = sorted(known)
        if len(ends) > 1 and ends[0] < index < ends[-1]:
            gaps = [b - a for a, b in pairwise(ends)]
            own = next(b - a for a, b in pairwise(ends) if a < index < b)
            assert own == max(gaps)
        known.append(index)


def test_commits_of_a_range_are_every_nth_with_the_newest(library):
    commits = history_commits(library, "v1.0..HEAD", 10)

    assert len(commits) == 11
    assert commits[-1] == sha_of(library, "HEAD")
    assert commits[-2] == sha_of(library, "HEAD~10")
    for span in ("HEAD", "v1.0..", "nowhere..HEAD"):
        with pytest.raises(UsageError):
            history_commits(library, span, 1)


def test_files_from_outside_do_not_hide_the_library(library, benchmarks, tmp_path):
    (benchmarks / "tinyquant.py").write_text("raise ImportError")
    project = project_with_benchmarks(str(library), str(benchmarks), None)

    built = built_tree(project.at(sha_of(library, "v1.0")), sha_of(library, "v1.0"))
    (benchmarks / "tinyquant.py").unlink()

    (source,) = built.sources
    assert Path(source.place).relative_to(built.folder).parts[0] == OVERLAY
    assert "revision 14" in (built.folder / "tinyquant" / "__init__.py").read_text()
    assert (built.folder / OVERLAY / "helper.py").read_text() == HELPER
    assert built.variables


def test_files_of_a_revision_replace_kernels_and_add_modules(library, benchmarks, tmp_path, git):
    clone = tmp_path / "tinyquant"
    git(tmp_path, "clone", "-q", str(library), str(clone))
    (clone / "kernels.py").write_text("raise ImportError('of the commit')\n")
    (clone / "setup.py").write_text("# of the commit\n")
    git(clone, "add", "--all")
    git(clone, "commit", "-q", "-m", "Old kernels")
    old = git(clone, "rev-parse", "HEAD")
    for name, text in {**FILES, "setup.py": "# of today\n"}.items():
        (clone / name).write_text(text)
    git(clone, "add", "--all")
    git(clone, "commit", "-q", "-m", "Benchmarks")

    project = project_with_benchmarks(str(clone), "HEAD", None)
    built = built_tree(project.at(old), old)

    assert project.benchmarks.origin == git(clone, "rev-parse", "HEAD")[:10]
    assert (built.folder / "kernels.py").read_text().strip() == KERNELS.strip()
    assert (built.folder / "helper.py").read_text().strip() == HELPER.strip()
    assert (built.folder / "setup.py").read_text() == "# of the commit\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--project-file", "HEAD"), "has no flexq-bench.toml"),
        (("--project-file", "nowhere"), "no file, no folder, and no revision"),
        (("--kernels-from", "nowhere.py"), "there is no such file"),
        ((), "has no flexq-bench.toml"),
    ],
)
def test_missing_benchmarks_are_named(cli, library, options, reason):
    ran = cli("compare", "v1.0", "HEAD", "--project", str(library), *options, "--backend", "cpu")

    assert ran.code == 2
    assert reason in ran.error


def test_project_file_and_commits_need_a_project(cli, benchmarks):
    for options in (("--project-file", str(benchmarks)), ("--commits", "A..B")):
        ran = cli("nightly", *options)

        assert ran.code == 2
        assert "--project" in ran.error


@pytest.mark.slow
def test_compare_takes_kernels_without_a_project_file(cli, library, benchmarks):
    ends = (sha_of(library, f"HEAD~{COMMITS - SLOW}"), "HEAD")
    kernels = ("--kernels-from", str(benchmarks / "kernels.py"), "--m", "8")

    ran = cli(
        *("compare", *ends, "--project", str(library), *kernels, "--json"),
        *("--backend", "cpu", "--processes", "1"),
    )

    assert ran.code == 1, ran.err
    document = json.loads(ran.out)
    assert document["benchmarks_from"] == str(benchmarks / "kernels.py")
    assert {case["verdict"] for case in document["cases"]} == {"slower"}


@pytest.mark.slow
def test_bisect_from_a_tag_names_the_slower_commit(cli, library, benchmarks):
    ran = cli(
        *("bisect", "tinyquant.w8a16 gemm cold m16n512k1024", "--good", "v1.0", "--bad", "HEAD"),
        *("--project", str(library), "--project-file", str(benchmarks)),
        *("--backend", "cpu", "--processes", "1", "--json"),
    )

    assert ran.code == 1, ran.err
    (suspect,) = json.loads(ran.out)["suspects"]
    assert suspect == sha_of(library, f"HEAD~{COMMITS - 1 - SLOW}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_backfill_measures_commits_once_and_says_whose_files(cli, library, benchmarks, database):
    command = (
        *("nightly", "--project", str(library), "--project-file", str(benchmarks)),
        *("--commits", "v1.0..HEAD", "--every", "5", "--backend", "cpu", "--json"),
    )
    first, again = cli(*command), cli(*command)

    assert first.code == again.code == 4, first.err  # one commit can't be imported
    document = json.loads(first.out)
    assert (document["commits"], document["measured_before"]) == (21, 0)
    shas = [result["commit"] for result in document["results"]]
    wanted = history_commits(library, "v1.0..HEAD", 5)
    assert set(shas) == set(wanted)
    assert shas[:3] == [wanted[-1], wanted[0], wanted[10]]
    broken = sha_of(library, f"HEAD~{COMMITS - 1 - BROKEN}")
    assert [result["commit"] for result in json.loads(again.out)["results"]] == [broken]
    with open_database(str(database)) as opened, opened.session() as session:
        records = [
            record
            for record in queries.stored_records(session, Record)
            if record.kernel == "tinyquant.w8a16"
        ]
        latest = queries.latest_results(session, queries.Filters(kernels=("tinyquant.w8a16",)))
    assert {record.commit.sha for record in records} == set(wanted) - {broken}
    assert {record.extra["benchmarks_from"] for record in records} == {str(benchmarks / FILE)}
    assert [row.commit for row in latest] == [wanted[-1]]
    assert document["change_points"] == 1
    assert (document["verdicts"], len(document["opened"])) == (1, 1)
