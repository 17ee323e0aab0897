"""`bisect`: the search for the commit that changed a series."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest

import flexq_bench.measure.ab
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.errors import BrokenRevisionError, InfrastructureError
from flexq_bench.fleet import local_pool, request_worker
from flexq_bench.fleet.requests import Bisection, bisect_request, submit
from flexq_bench.verdicts import CaseComparison, Comparison, confirm
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.errors import WorkloadError

CASE = "cublas-fp16 gemm hot m1n32k32"


@pytest.fixture
def commits(checkout, tmp_path, monkeypatch):
    """Eight commits that look like ours, oldest first; the current folder is their checkout."""
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    return checkout(8)


@pytest.fixture
def speeds(monkeypatch):
    """What commits take, microseconds: a number, an exception, or one after the other of a list.

    None: no data. Counts the comparisons.
    """

    def use(by_commit: dict[str, object]) -> list[str]:
        compared: list[str] = []

        def compare(_repository, base, head, cases, *, on_progress=None, **_options):
            compared.append(head)
            if isinstance(by_commit[head], BaseException):
                raise by_commit[head]
            takes = by_commit[head]
            if isinstance(takes, list):
                takes = takes.pop(0)
            if takes is None:
                nothing = Comparison((), (), ())
                yield CaseComparison(
                    cases[0], base, head, nothing, confirm(nothing), detail="it died"
                )
                return
            scatter = [math.exp(0.001 * (-1) ** (i // 2)) for i in range(12)]
            comparison = Comparison(
                (float(by_commit[base]),) * 12,
                tuple(float(takes) * value for value in scatter),
                tuple(i // 2 for i in range(12)),
            )
            yield CaseComparison(cases[0], base, head, comparison, confirm(comparison))

        monkeypatch.setattr(flexq_bench.measure.ab, "compare_commits", compare)
        return compared

    return use


def bisected(cli, commits, *more):
    ends = ("--good", commits[0], "--bad", commits[-1])
    return cli("bisect", CASE, *ends, "--backend", "cpu", *more)


def test_slower_commit_is_named(cli, commits, speeds):
    speeds({commit: 100 if i < 5 else 104 for i, commit in enumerate(commits)})

    ran = bisected(cli, commits)

    assert ran.code == 1
    assert ran.out.splitlines()[-2:] == [
        "the commit that made it slower:",
        f"  {commits[5][:10]} change 5",
    ]


def test_faster_commit_is_no_regression(cli, commits, speeds):
    speeds({commit: 100 if i < 3 else 90 for i, commit in enumerate(commits)})

    ran = bisected(cli, commits, "--json")

    report = json.loads(ran.out)
    assert (ran.code, report["suspects"]) == (0, [commits[3]])
    assert report["relative_change"] == pytest.approx(-0.1, abs=0.001)


def test_commits_whose_worker_fails_are_skipped(cli, commits, speeds):
    by_commit = {commit: 100 if i < 6 else 104 for i, commit in enumerate(commits)}
    by_commit[commits[3]] = WorkloadError("flexq-bench.toml: kernels is missing")
    by_commit[commits[5]] = BrokenRevisionError("it died: SyntaxError")
    speeds(by_commit)

    ran = bisected(cli, commits)

    assert ran.code == 3
    assert f"{commits[3][:10]} skipped: flexq-bench.toml: kernels is missing" in ran.out
    assert f"{commits[5][:10]} skipped: it died: SyntaxError" in ran.out
    assert [line.split()[0] for line in ran.out.splitlines()[-2:]] == [
        commits[5][:10],
        commits[6][:10],
    ]


def test_slower_merge_is_followed_into_its_branch(cli, commits, speeds, git):
    def commit(name):
        Path(f"flexq_bench/{name}.py").touch()
        git(Path(), "add", ".")
        git(Path(), "commit", "-q", "-m", name)
        return git(Path(), "rev-parse", "HEAD")

    git(Path(), "checkout", "-q", "-b", "branch", commits[3])
    inner = [commit(f"inner{number}") for number in range(3)]
    git(Path(), "checkout", "-q", "main")
    git(Path(), "merge", "-q", "--no-ff", "-m", "merge of a branch", "branch")
    merge = git(Path(), "rev-parse", "HEAD")
    times = dict.fromkeys(commits, 100) | dict.fromkeys((*inner[1:], merge, commit("last")), 104)
    speeds(times | {inner[0]: 100})

    ran = bisected(cli, [commits[0], "main"])
    *_, suspect, hint, otherwise = ran.out.splitlines()

    assert (ran.code, suspect) == (1, f"  {merge[:10]} merge of a branch")
    words, line = hint.split(": ", 1)
    assert words == "it merges 3 commits, continue there"
    assert otherwise == "if nothing made it slower there, the merge itself did"
    arguments = shlex.split(line[line.index("bisect ") :])
    again = cli(*arguments)
    assert again.out.splitlines()[-1] == f"  {inner[1][:10]} inner1"
    assert arguments[2:6] == ["--good", commits[3][:10], "--bad", inner[-1][:10]]

    # From a commit of the branch on: what main got meanwhile was in no comparison before the merge.
    ran = bisected(cli, [inner[0], "main"], "--json")
    assert ran.code == 1, ran.err
    report = json.loads(ran.out)
    assert report["suspects"] == [merge]
    assert [(merged["good"], merged["commits"]) for merged in report["merged"]] == [
        (commits[3], 4),
        (inner[0], 2),
    ]


def test_machine_failure_ends_search_without_skipping(cli, commits, speeds):
    by_commit = {commit: 100 if i < 6 else 104 for i, commit in enumerate(commits)}
    speeds({**by_commit, commits[5]: InfrastructureError("the device is not free")})

    ran = bisected(cli, commits)

    assert ran.code == 5
    assert "the device is not free; the search stops at " + commits[5][:10] in ran.error
    assert "skipped" not in ran.out
    compared = speeds(by_commit)
    assert bisected(cli, commits).code == 1
    assert (compared[0], commits[-1] in compared) == (commits[5], False)


def test_commit_whose_worker_dies_is_measured_again(cli, commits, speeds):
    by_commit = {commit: 100 if i < 6 else 104 for i, commit in enumerate(commits)}
    compared = speeds({**by_commit, commits[5]: [None, 100]})
    assert bisected(cli, commits).code == 1

    compared = speeds({**by_commit, commits[5]: [None, None]})
    ran = bisected(cli, commits)

    assert (ran.code, compared.count(commits[5])) == (3, 2)
    assert f"{commits[5][:10]} skipped: it died" in ran.out


def test_interrupted_search_resumes(cli, commits, speeds):
    by_commit = {commit: 100 if i < 6 else 104 for i, commit in enumerate(commits)}
    speeds({**by_commit, commits[5]: KeyboardInterrupt()})
    assert bisected(cli, commits).code == 130

    compared = speeds(by_commit)
    ran = bisected(cli, commits)

    assert ran.code == 1
    assert compared[0] == commits[5]
    assert commits[-1] not in compared
    assert "resuming with" in ran.out
    again = speeds(by_commit)
    bisected(cli, commits)
    assert again[0] == commits[-1]  # a finished search leaves nothing behind


@pytest.mark.parametrize(("bad", "code", "word"), [(100, 0, "same"), (100.95, 3, "ambiguous")])
def test_equal_ends_leave_nothing_to_search(cli, commits, speeds, bad, code, word):
    compared = speeds({commits[0]: 100, commits[-1]: bad})

    ran = bisected(cli, commits)

    assert ran.code == code
    assert f"nothing to search: bad against good is {word}" in ran.out
    assert len(compared) == 1


def test_bisect_takes_id_of_stored_series(cli, measured, commits, speeds):
    speeds({commit: 100 if i < 5 else 104 for i, commit in enumerate(commits)})
    (row,) = [
        row
        for row in json.loads(cli("list", "series", "--json").out)
        if row["kernel"] == "cublas-fp16"
    ]

    ends = ("--good", commits[0], "--bad", commits[-1], "--backend", "cpu", "--json")
    report = json.loads(cli("bisect", str(row["id"]), *ends).out)

    assert report["case"] == "cublas-fp16 gemm cold m1n32k32"


def test_worker_serves_requested_bisection(cli, measured, commits, speeds, monkeypatch):
    speeds({commit: 100 if i < 5 else 104 for i, commit in enumerate(commits)})
    monkeypatch.setattr(local_pool, "compare_commits", flexq_bench.measure.ab.compare_commits)
    monkeypatch.setattr(request_worker, "ROOT", Path.cwd())  # the clone that a worker runs from
    wanted = Bisection(Case.from_key(CASE), commits[0], commits[-1])
    with open_database(str(measured)) as database:
        with database.session() as session:
            request = bisect_request(session, wanted, requester="ada", gpu="", backend="cpu")
            submit(session, request)

        ran = cli("worker", "--once", "--backend", "cpu")

        with database.session() as session:
            (row,) = queries.requests(session)
    culprit = f"{commits[5][:10]} made it 4.0 % slower"
    assert (row.state, row.detail) == ("done", culprit)
    assert f"request {request.uuid[:8]} done: {culprit}" in ran.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CASE, "--good", "main", "--bad", "main~1"), "is not an ancestor of"),
        ((CASE, "--good", "main", "--bad", "main"), "nothing to search"),
        ((CASE, "--good", "gone", "--bad", "main"), "no revision 'gone'"),
        (("some words", "--good", "main~1", "--bad", "main"), "is not the key of a case"),
        (("99", "--good", "main~1", "--bad", "main"), "no series 99"),
    ],
)
def test_invalid_searches_are_usage_errors(cli, measured, commits, arguments, message):
    ran = cli("bisect", *arguments, "--backend", "cpu")

    assert ran.code == 2
    assert message in ran.error
