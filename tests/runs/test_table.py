"""Terminal tables of a run's results."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flexq_bench.runs.lifecycle import new_run
from flexq_bench.runs.record import build_record
from flexq_bench.runs.table import case_in_words, problem_lines, results_table
from flexq_bench.stats.baseline import BASELINE, compare_with_baseline


@pytest.fixture
def result(a_case, a_result, worker, commit):
    def build(kernel="flexq-w6a6", *, m=1, n=256, k=256, **measured):
        return build_record(
            a_case(kernel, m, n, k),
            a_result(**measured),
            new_run("smoke", "manual", []),
            commit,
            worker.device,
            worker.environment,
        )

    return build


def rendered(results) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(results_table(compare_with_baseline(results)))
    return out.getvalue()


def test_table_row_fits_120_columns(result):
    text = rendered(
        [
            result("cublaslt-w8a8", n=28672, k=8192, median_us=12345.678),
            result("read-6", n=28672, k=8192),
            result(
                "flexq-w6a6",
                m=1024,
                n=28672,
                k=8192,
                status="incorrect",
                detail="element (0, 0)",
            ),
        ]
    )

    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in text
    assert "12346" in text
    assert "llama-7b o_proj" in text
    assert "NO" in text


def test_longest_names_fit(result):
    text = rendered([result("flexq-w6a6-of-a-long-name-x", m=2048, n=1 << 24, k=1 << 24)])

    assert max(map(len, text.splitlines())) <= 120


def test_problems_are_grouped_by_cause_worst_first(result):
    lines = problem_lines(
        [
            result(m=1, status="unsupported", detail="no such GPU"),
            result(m=2, status="failed", detail="boom"),
            result(m=4, status="failed", detail="boom"),
            result(m=8, status="ok"),
            result(m=16, status="incorrect", detail="y[0,0]"),
        ]
    )

    assert [line.partition(":")[0] for line in lines] == ["incorrect", "failed", "unsupported"]
    assert "and 1 more" in lines[1]


def test_cpu_results_have_no_speedup(result):
    rows = compare_with_baseline([result("flexq-w6a6"), result(BASELINE)])

    with_ratio, without = (
        [column.header for column in results_table(rows, with_speedup=on).columns]
        for on in (True, False)
    )

    assert set(with_ratio) - set(without) == {f"× {BASELINE}"}
    assert len(results_table(rows, with_speedup=False).columns) == len(without)


def test_progress_names_probes_without_an_operation(result):
    assert case_in_words(result("empty")) == "empty"
    assert case_in_words(result("read-6", n=512)) == "read-6 N=512 K=256"
    assert case_in_words(result()) == "flexq-w6a6 gemm cold m1n256k256"
