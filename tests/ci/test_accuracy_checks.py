"""The table of checks of the accuracy gate, and what is not judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flexq_bench.ci.accuracy_gate import policy as policies
from flexq_bench.ci.accuracy_gate.checks import CHECKS
from flexq_bench.ci.accuracy_gate.checks.tail import judge_tail
from flexq_bench.ci.accuracy_gate.contract import (
    Check,
    CheckContext,
    CheckLimit,
    LimitOutcome,
    ModelFolders,
    NotJudgedError,
    Stage,
)
from flexq_bench.ci.accuracy_gate.gate import AccuracyReport
from flexq_bench.ci.accuracy_gate.results import SchemeResults
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.ci.reports.accuracy import headline, junit, notes, reasons, terminal
from flexq_bench.exit_codes import ExitCode
from flexq_bench.workloads.data_files import Amount, DataTable

POLICY = 'version = 1\nschemes = ["w6a6"]\n[[perplexity]]\ntext = "wikitext"\npercent = 1\n'
DOCS = Path(__file__).parents[2] / "docs"


class Size(DataTable):
    most: Amount


class SizeCheck(Check[Size]):
    """Judges the first of two names, and has no opinion on the second."""

    key, table, stage = "size", Size, Stage.FOLDERS

    def names(self, limit):
        return ("size of files", "size of names")

    def judge(self, limit, context):
        yield LimitOutcome(context.scheme, "size of files", GateOutcome.PASS, "", f"{limit.most}")
        raise NotJudgedError("there is no folder")


def outcomes(**settings):
    limit = CheckLimit(SizeCheck(), Size(most=1))
    policy = policies.AccuracyPolicy("mine", 1, "", ("w6a6",), "fp16", (limit,), **settings)
    results = SchemeResults("w6a6", "fp16", (), {})
    context = CheckContext(policy, "w6a6", "fp16", ModelFolders(), None, results)
    return tuple(context.outcomes(limit))


def a_report(judged):
    return AccuracyReport("tiny", "ab" * 32, "fp16", "mine", "c" * 40, "H200", judged)


def test_registered_check_is_read_from_a_policy(monkeypatch, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(POLICY + "[size]\nmost = 3\n")
    table = policies.policy_table((*CHECKS, SizeCheck()))
    monkeypatch.setattr(policies, "CHECKS", (*CHECKS, SizeCheck()))
    monkeypatch.setattr(policies, "_PolicyTable", table)
    assert policies.load_accuracy_policy(str(path)).of(Size) == (Size(most=3),)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.key)
def test_each_check_has_a_row_in_the_documentation(check):
    row = f"- `[[{check.key}]]`" if check.repeated else f"- `[{check.key}]`"
    assert row in (DOCS / "accuracy-gate.md").read_text()


def test_keys_of_checks_are_distinct():
    assert len({check.key for check in CHECKS}) == len(CHECKS)


def test_unjudged_name_has_the_reason_and_exit_code_4():
    judged = outcomes()
    assert [(one.check, one.outcome, one.reason) for one in judged] == [
        ("size of files", "pass", ""),
        ("size of names", "not judged", "there is no folder"),
    ]
    report = a_report(judged)
    assert report.exit_code == ExitCode.MISSING
    assert headline(report).startswith("incomplete: 1 not judged, 1 pass; ")
    assert 'skipped="1"' in junit(report)


def test_policy_allows_unjudged_checks_by_name():
    report = a_report(outcomes(allow_not_judged=("size of n*",)))
    assert report.exit_code == ExitCode.PASS
    assert headline(report).startswith("passed: 1 not judged (allowed), 1 pass; ")


def test_broken_check_is_never_allowed(monkeypatch):
    def breaks(*_):
        raise RuntimeError("sizes must match")

    monkeypatch.setattr(SizeCheck, "judge", breaks)

    judged = outcomes(allow_not_judged=("size*",))

    assert {(one.reason, one.allowed) for one in judged} == {("sizes must match", False)}
    assert a_report(judged).exit_code == ExitCode.MISSING


def test_gate_that_judged_nothing_does_not_pass():
    (_, unjudged) = outcomes(allow_not_judged=("size*",))
    assert a_report((unjudged,)).exit_code == ExitCode.MISSING


def test_named_cause_precedes_the_details():
    judged = LimitOutcome(
        *("w6a6", "weights", GateOutcome.FAIL, "", ""),
        cause="layers 1 and 2 are exchanged",
        details=("model.layers.1: all rows",),
    )
    assert list(notes(a_report((judged,)))) == [
        "w6a6: layers 1 and 2 are exchanged",
        "w6a6: weights: model.layers.1: all rows",
    ]


def test_report_has_one_line_for_a_check_of_several_texts():
    losses = {"general": 0.2, "code": 4.2, "maths": 0.9}
    judged = tuple(
        LimitOutcome(
            *("w6a6", f"{check} of {text}", GateOutcome.FAIL if loss > 3 else GateOutcome.PASS),
            *("grew" if loss > 3 else "", "no loss of 3 %"),
            change=loss,
            unit="%",
            text=text,
        )
        for check in ("perplexity", "worst segments")
        for text, loss in losses.items()
        if check == "perplexity" or text != "code"
    )
    report = a_report(judged)
    outcome, check, value, *_ = (list(column.cells) for column in terminal(report).columns)
    assert (outcome, check) == (["fail", "pass"], ["perplexity", "worst segments"])
    assert value == ["code +4.20 %", "maths +0.90 %"]
    assert list(reasons(report)) == ["w6a6: perplexity: fail: grew"]
    assert terminal(report, every=True).row_count == len(judged)


@pytest.mark.parametrize(
    ("segments", "loss", "outcome"),
    [(60, 0.0, "pass"), (60, 0.1, "ambiguous"), (240, 0.1, "fail"), (240, 0.0, "pass")],
)
def test_tail_fails_only_with_enough_segments(segments, loss, outcome):
    losses = np.random.default_rng(0).normal(0, 0.01, segments)
    losses[::20] += loss
    assert judge_tail(losses, 0.02, 0.01)[1] == outcome
