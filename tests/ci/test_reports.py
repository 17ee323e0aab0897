"""A gate's reports: Markdown for a pull request, JUnit XML, JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from flexq_bench.ci.reports.headline import headline
from flexq_bench.ci.reports.junit import junit
from flexq_bench.ci.reports.machine_readable import as_json
from flexq_bench.ci.reports.markdown import MARKER, markdown
from flexq_bench.ci.reports.terminal import findings_table

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


def test_the_headline_counts_what_was_found(report):
    assert headline(report) == (
        "incomplete: 1 missing, 2 regressions, 1 ambiguous, 1 waived, 1 pass, 1 probe; "
        "6 of 7 cases compared"
    )


def test_the_comment_can_be_found_again_by_its_first_line(report):
    assert markdown(report).splitlines()[0] == MARKER
    assert MARKER.startswith("<!--")


def test_the_comment_shows_what_fails_with_the_worst_first(report):
    text = markdown(report)

    shown = [line for line in text.splitlines() if "| **" in line]
    assert [line.split("|")[7].strip() for line in shown] == [
        "**missing**", "**regression**", "**regression**", "**ambiguous**",
    ]  # fmt: skip
    assert "2x256x256" in shown[1]
    assert "no result arrived" in shown[0]
    assert "<summary>1 faster</summary>" in text
    assert "read-6" not in text


def test_the_comment_folds_probes_and_says_what_changed_beside_a_kernel(gate, compared):
    kernels = (("flexq-w6a6", 1.05), ("cublaslt-w8a8", 1.02), ("read-6", 1.02))
    text = markdown(gate(*(compared(kernel, slower, noise=0.0001) for kernel, slower in kernels)))

    row = next(line for line in text.splitlines() if "flexq-w6a6" in line)
    assert "in the same comparison floor +" in row
    assert "remains for the code" in row
    assert "<summary>1 probe, baselines of other cases" in text


def test_every_report_says_how_many_pairs_decided_and_that_it_stopped_early(gate, compared):
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


def test_every_row_of_the_comment_has_every_cell(report):
    rows = [line for line in markdown(report).splitlines() if line.startswith("| ")]

    assert {line.count(" |") for line in rows} == {9}


def test_words_of_people_are_text_in_the_comment(report):
    text = markdown(report)

    for sign in ("<img", "@everyone", "`rm`", "[link]"):
        assert sign not in text
    assert "&lt;img" in text


def test_the_comment_fits_whatever_the_size_of_the_plan(report):
    many = replace(report, findings=report.findings * 2000, notes=("long " * 200,) * 500)

    assert len(markdown(many)) < 65_536
    assert "more: see the JSON report" in markdown(many)


def test_junit_counts_each_case_once(report):
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


def test_what_xml_has_no_place_for_is_left_out(report):
    finding = replace(report.findings[0], reason="bell\x07 \ud800 <&>")

    root = ElementTree.fromstring(junit(replace(report, findings=(finding,))))

    assert root.find(".//failure").text == "bell  <&> (owner: kernels)"


def test_json_has_every_case_in_the_plan_s_order(report):
    found = json.loads(as_json(report))

    assert found["exit_code"] == 4
    assert [one["outcome"] for one in found["cases"]] == [
        "regression", "regression", "ambiguous", "waived", "pass", "probe", "missing",
    ]  # fmt: skip
    assert found["cases"][0]["change_percent"] == pytest.approx(5, abs=0.2)
    assert found["cases"][3]["waiver"]["expires"] == "2026-01-31"
    assert found["cases"][6]["change_percent"] is None
    assert found["cases"][0]["waiver"] is None
