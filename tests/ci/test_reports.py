"""Reports of the performance gate: Markdown, JUnit XML, JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from flexq_bench.ci.gate_static import StaticReport
from flexq_bench.ci.reports import static
from flexq_bench.ci.reports.formats import plain
from flexq_bench.ci.reports.perf import (
    MARKER,
    as_json,
    findings_table,
    headline,
    junit,
    markdown,
)
from flexq_bench.measure.machine_code.comparison import Broken

POLICY = """
[[waiver]]
kernels = ["abq-*"]
reason = "<img src=x> | @everyone `rm` [link](http://x)"
owner = "Ada"
expires = 2026-01-31
"""


@pytest.fixture
def report(gate, compared):
    """One case of each outcome, and one that is faster."""
    lost = compared("flexq-w6a8").case
    found = [
        compared("flexq-w6a6", 1.05),
        compared("flexq-w6a6", 1.08, shape=(2, 256, 256)),
        compared("cublas-fp16", 1.02, noise=0.05),
        compared("abq-w2a8", 1.2),
        compared("cublaslt-w8a8", 0.9),
        compared("read-6"),
    ]
    return gate(*found, plan=[*(one.case for one in found), lost], policy=POLICY)


def test_headline_counts_outcomes(report):
    assert headline(report) == (
        "incomplete: 1 missing, 2 regressions, 1 ambiguous, 1 waived, 1 pass, 1 probe; "
        "6 of 7 cases compared"
    )


def test_first_line_of_the_comment_is_the_marker(report):
    assert markdown(report).splitlines()[0] == MARKER
    assert MARKER.startswith("<!--")


def test_comment_lists_failures_worst_first(report):
    text = markdown(report)

    shown = [line for line in text.splitlines() if "| **" in line]
    assert [line.split("|")[7].strip() for line in shown] == [
        "**missing**", "**regression**", "**regression**", "**ambiguous**",
    ]  # fmt: skip
    assert "2x256x256" in shown[1]
    assert "no result arrived" in shown[0]
    assert "<summary>1 faster</summary>" in text
    assert "read-6" not in text


def test_comment_collapses_probes_and_names_causes(gate, compared):
    kernels = (("flexq-w6a6", 1.05), ("cublaslt-w8a8", 1.02), ("read-6", 1.02))
    text = markdown(gate(*(compared(kernel, slower, noise=0.0001) for kernel, slower in kernels)))

    row = next(line for line in text.splitlines() if "flexq-w6a6" in line)
    assert "in the same comparison floor +" in row
    assert "remains for the code" in row
    assert "<summary>1 probe, baselines of other cases" in text


def test_reports_have_pairs_and_early_stop(gate, compared):
    report = gate(
        compared("flexq-w6a6", 1.1, placements=7), compared("cublas-fp16", 1.05, placements=12)
    )
    early, usual = json.loads(as_json(report))["cases"]

    assert (early["pairs"], early["stopped_early"]) == (7, True)
    assert "clear after 7 pairs" in early["reason"]
    assert (usual["pairs"], usual["stopped_early"]) == (12, False)
    assert "| 7 | **regression** | kernels | clear, so stopped early |" in markdown(report)
    assert "clear after 7 pairs" in junit(report)
    table = findings_table(report)
    assert table is not None
    assert list(table.columns[4].cells) == ["7", "12"]
    assert list(table.columns[6].cells) == ["slower: clear, so stopped early", "slower"]


def test_comment_rows_have_all_cells(report):
    rows = [line for line in markdown(report).splitlines() if line.startswith("| ")]

    assert {line.count(" |") for line in rows} == {9}


def test_texts_in_the_comment_are_escaped(report):
    text = markdown(report)

    for sign in ("<img", "@everyone", "`rm`", "[link]"):
        assert sign not in text
    assert "&lt;img" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("![x](https://a.b/c)", "&#33;&#91;x&#93;(https&#58;//a.b/c)"),
        ("see www.a.b, a.b", "see www&#46;a.b, a.b"),
        ("a\u202eb\x1b[0m\nc", "a b &#91;0m c"),
    ],
)
def test_neither_links_nor_control_characters_get_into_a_comment(text, shown):
    assert plain(text) == shown


def test_texts_of_the_static_gate_are_escaped():
    """Names of functions and errors of a compiler are what head's author makes them."""
    broken = (Broken("mine.cu", "sm_90", ("mine.k",), "error: <img src=x> `rm` @everyone"),)
    report = StaticReport("a", "b", ("sm_90",), 0, 0, 0, 0, 0, 0, (), broken, {}, ())

    for sign in ("<img", "@everyone", "`rm`"):
        assert sign not in static.markdown(report)


def test_comment_of_a_large_plan_fits_the_limit(report):
    many = replace(report, findings=report.findings * 2000, notes=("long " * 200,) * 500)

    assert len(markdown(many)) < 65_536
    assert "more: see the JSON report" in markdown(many)


def test_junit_has_each_case_once(report):
    root = ElementTree.fromstring(junit(report))

    counts = {name: int(value) for name, value in root.attrib.items()}
    assert counts == {"tests": 7, "failures": 3, "errors": 1, "skipped": 1}
    assert len(root.findall(".//testcase")) == 7
    assert len(root.findall(".//failure")) == 3
    (skipped,) = root.findall(".//skipped")
    assert "waived until 2026-01-31 by Ada" in skipped.attrib["message"]
    assert {failure.attrib["type"] for failure in root.iter("failure")} == {
        "regression", "ambiguous",
    }  # fmt: skip


def test_junit_omits_forbidden_characters(report):
    finding = replace(report.findings[0], reason="bell\x07 \ud800 <&>")

    root = ElementTree.fromstring(junit(replace(report, findings=(finding,))))

    assert root.find(".//failure").text == "bell  <&> (owner: kernels)"


def test_json_has_all_cases_in_plan_order(report):
    found = json.loads(as_json(report))

    assert found["exit_code"] == 4
    assert [one["outcome"] for one in found["cases"]] == [
        "regression", "regression", "ambiguous", "waived", "pass", "probe", "missing",
    ]  # fmt: skip
    assert found["cases"][0]["change_percent"] == pytest.approx(5, abs=0.2)
    assert found["cases"][3]["waiver"]["expires"] == "2026-01-31"
    assert found["cases"][6]["change_percent"] is None
    assert found["cases"][0]["waiver"] is None
