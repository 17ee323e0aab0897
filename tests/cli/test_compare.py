"""`compare`: the kind of its two names, its table, its JSON and its exit code."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import flexq_bench.measure.ab
from flexq_bench.cli.app import main
from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import read_records, write_records
from flexq_bench.db.queries import runs
from flexq_bench.db.records import CommitInfo
from flexq_bench.measure.protocol import PROTOCOL_VERSION
from flexq_bench.measure.worker_process import WorkerError
from flexq_bench.repository.provenance import current_commit
from flexq_bench.results.comparison_report import exit_code_of_verdicts
from flexq_bench.results.stored_comparison import compare_stored
from flexq_bench.verdicts import CaseComparison, Comparison, Verdict, confirm

ONE_CASE = ("--kernels", "flexq-w6a6", "--m", "4", "--stage", "gemm", "--backend", "cpu")


@pytest.fixture
def repository(checkout, tmp_path):
    """A checkout with two commits that look like ours, and the current folder."""
    checkout(2)
    return tmp_path / "checkout"


@pytest.fixture
def compared(monkeypatch):
    """Comparisons are made up: head is slower by `change` (ln) in every case."""

    def use(change: float = 0.0, error: Exception | None = None, blocks: int = 12) -> None:
        def compare(*arguments, on_progress=None, **_options):
            if error is not None:
                raise error
            *_, base, head, cases = arguments
            for case in cases:
                spread = [change + 0.001 * (-1) ** (i // 2) for i in range(blocks)]
                comparison = Comparison(
                    (100.0,) * blocks,
                    tuple(100 * math.exp(value) for value in spread),
                    tuple(i // 2 for i in range(blocks)),
                )
                yield CaseComparison(case, base, head, comparison, confirm(comparison))

        monkeypatch.setattr(flexq_bench.measure.ab, "compare_commits", compare)
        monkeypatch.setattr(flexq_bench.measure.ab, "compare_kernels", compare)

    return use


@pytest.mark.parametrize(
    ("change", "blocks", "code", "word"),
    [
        (0.0, 12, 0, "same"),
        (-0.05, 12, 0, "faster"),
        (0.05, 12, 1, "slower, code"),
        (0.0095, 12, 3, "ambiguous"),
        (0.05, 6, 4, "no-data"),
    ],
)
def test_exit_code_and_table_follow_verdict(cli, repository, compared, change, blocks, code, word):
    compared(change, blocks=blocks)

    ran = cli("compare", "main~1", "main", *ONE_CASE)

    assert ran.code == code
    assert f"{word}" in ran.out
    assert "main against main~1, interleaved on cpu" in ran.out
    assert ran.err == ""


def test_json_comparison_has_every_block(cli, repository, compared):
    compared(0.05, blocks=6)

    report = json.loads(cli("compare", "main~1", "main", *ONE_CASE, "--json").out)

    (case, *_) = report["cases"]
    assert (report["kind"], report["exit_code"]) == ("commits", 4)
    assert case["log_ratio"] is None
    assert case["comparison"]["base_us"] == [100.0] * 6
    assert report["rules"]["processes"] == 6


def test_two_labels_are_compared_on_shapes_of_suite(cli, compared):
    compared(0.05)

    ran = cli("compare", "cublas-fp16", "flexq-w6a6", "--m", "1,8", "--backend", "cpu", "--json")

    report = json.loads(ran.out)
    assert (ran.code, report["kind"]) == (1, "kernels")
    assert {case["case"] for case in report["cases"]} == {
        f"cublas-fp16 gemm cold m{m}n512k1376" for m in (1, 8)
    }


def test_two_labels_are_compared_on_shapes_of_options(cli, compared):
    compared()
    shape = ("--n", "128", "--k", "256,512", "--m", "2", "--backend", "cpu")

    ran = cli("compare", "flexq-w6a6", "cublaslt-w8a8", *shape, "--json")

    keys = [case["case"] for case in json.loads(ran.out)["cases"]]
    assert ["m2n128k256" in key or "m2n128k512" in key for key in keys] == [True, True]


def test_options_that_leave_no_case_are_named_as_the_reason(cli, compared):
    compared()
    narrow = ("--m", "1", "--layers", "256x256", "--backend", "cpu")

    ran = cli("compare", "w8a16", "cublaslt-w8a8", *narrow)

    assert ran.code == 2
    assert "has none of these options together" in ran.error


def test_own_shapes_and_suite_are_refused_together(cli):
    options = ("--n", "128", "--k", "256", "--suite", "smoke")

    assert cli("compare", "flexq-w6a6", "cublaslt-w8a8", *options).code == 2


def test_probes_are_compared_only_if_requested(cli, repository, compared):
    compared()

    every = json.loads(cli("compare", "main~1", "main", "--backend", "cpu", "--json").out)
    some = json.loads(
        cli("compare", "main", "main", "--kernels", "read-6", "--backend", "cpu", "--json").out
    )

    assert not [c for c in every["cases"] if c["case"].startswith(("read", "empty", "spin"))]
    assert {c["case"].split()[0] for c in some["cases"]} == {"read-6"}


def test_commit_whose_worker_does_not_start(cli, repository, compared):
    compared(error=WorkerError("abc died (exit code 1) at 'describe': SyntaxError"))

    ran = cli("compare", "main~1", "main", *ONE_CASE)

    assert ran.code == 5
    assert ran.error == "flexq-bench: abc died (exit code 1) at 'describe': SyntaxError"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("main", "mian"), "no revision 'mian'"),
        (("flexq-w6a6", "main"), "flexq-w6a6 is a kernel and main is none"),
        (("flexq-w6a6", "abq-w6a6", "--kernels", "flexq*"), "leave out --kernels"),
        (("main", "main", "--suite", "smokey"), "smoke"),
        (("main", "main", "--device", "cuda:7"), "no device 'cuda:7'"),
        (("main", "main", "--models", "llama-7b"), "has no model"),
        (("dead", "beef", "--kind", "runs"), "no database|no run"),
        (("main", "main", "--repository", ".."), "is not in a git repository"),
    ],
)
def test_invalid_comparisons_are_usage_errors(cli, repository, arguments, message):
    ran = cli("compare", *arguments)

    assert ran.code == 2
    assert any(part in ran.error for part in message.split("|")), ran.error


@pytest.fixture
def two_runs(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The uuids of two runs of the same cases at one commit, older first."""
    clean = replace(current_commit(), dirty=False)
    monkeypatch.setattr("flexq_bench.cli.measuring.current_commit", lambda: clean)
    out = ("--db", str(measured))
    shape = ("--m", "1", "--n", "32", "--k", "32")
    assert main(("sweep", "--kernels", "cublas-fp16", *shape, *out)) == 0
    shutil.copy(measured, tmp_path / "copy.sqlite")
    with open_database(str(measured)) as database, database.session() as session:
        newer, older = runs(session)
    return older.uuid, newer.uuid


def test_stored_runs_are_compared_with_caveat(cli, two_runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    older, newer = two_runs

    ran = cli("compare", older[:13], newer[:13])

    assert ran.code in (0, 1, 3)
    assert "95 % interval" in ran.out
    assert "so the machine may cause differences; both are of one" in ran.out
    report = json.loads(cli("compare", older, newer, "--json").out)
    assert (report["kind"], report["interleaved"]) == ("runs", False)
    assert {case["case"].split()[0] for case in report["cases"]} == {
        "cublas-fp16",
        "empty",
        "read-16",
    }


def import_copy(cli, run, folder, **changes):
    """Import the results of a stored run as those of the run "another"; returns its commit."""
    file = str(folder / "r.jsonl")
    cli("db", "export", file, "--run", run)
    records = list(read_records(file))
    changes["run"] = replace(records[0].run, uuid="another", idempotency_key="another")
    write_records(file, [replace(r, uuid=r.uuid[::-1], **changes) for r in records])
    cli("db", "import", file)
    return records[0].commit


def test_stored_runs_of_two_commits_suggest_interleaved_comparison(cli, two_runs, tmp_path):
    older, _ = two_runs
    later = CommitInfo("f" * 40, None, None, dirty=False)
    sha = import_copy(cli, older, tmp_path, commit=later).sha

    ran = cli("compare", older, "another")

    shown = sha if sha.startswith("pkg-") else sha[:10]
    assert f"compare {shown} ffffffffff" in ran.out


def test_stored_runs_of_two_protocols_are_refused(cli, two_runs, tmp_path):
    older, _ = two_runs
    import_copy(cli, older, tmp_path, protocol_version=1, regime=None, sample_gap_us=None)

    ran = cli("compare", older, "another")

    assert ran.code == 2
    assert f"measured by protocol {PROTOCOL_VERSION} and another by 1: " in ran.error


class Stored:
    """A result of a stored run."""

    def __init__(self, median, half=0.1, *, series_id=1, status="ok", case="a"):
        self.case, self.gpu, self.series_id = case, "GPU", series_id
        self.status, self.detail = status, "why" if status != "ok" else ""
        self.median_us = median
        self.ci_low_us = None if median is None else median - half
        self.ci_high_us = None if median is None else median + half


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        (Stored(100), Stored(105), Verdict.SLOWER),
        (Stored(100), Stored(95), Verdict.FASTER),
        (Stored(100), Stored(100.2), Verdict.SAME),
        (Stored(100, 2), Stored(101.5, 2), Verdict.AMBIGUOUS),
        (Stored(100), Stored(50, series_id=2), Verdict.NO_DATA),
        (Stored(100), Stored(None, status="failed"), Verdict.NO_DATA),
        (Stored(100), Stored(50, status="incorrect"), Verdict.INCORRECT),
        (Stored(100), Stored(100, case="b"), Verdict.NO_DATA),
    ],
)
def test_stored_results_compare_within_one_series(base, head, verdict):
    report = compare_stored([base], [head])

    assert {row.verdict for row in report} == {verdict}
    assert all((row.ratio is None) == (verdict in ("no-data", "incorrect")) for row in report)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([], 0),
        (["same", "faster"], 0),
        (["same", "slower", "no-data"], 1),
        (["incorrect"], 1),
        (["ambiguous", "no-data"], 4),
        (["ambiguous", "same"], 3),
    ],
)
def test_worst_verdict_sets_exit_code(verdicts, code):
    assert exit_code_of_verdicts(map(Verdict, verdicts)) == code
