"""Records of the accuracy gate's decisions."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from flexq_bench.accuracy.records import ResultOrigin
from flexq_bench.ci.accuracy_gate.contract import LimitOutcome
from flexq_bench.ci.accuracy_gate.gate import AccuracyReport, gate_records
from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.runs.lifecycle import new_run

NOW = datetime(2026, 1, 3, tzinfo=UTC)
COMMIT = CommitInfo("c" * 40, None, 1, False)
DEVICE = DeviceInfo("GPU-1", "H200", "cuda")
ORIGIN = ResultOrigin("tiny", "ab" * 32, 0, new_run("accuracy", "gate", ()), COMMIT, DEVICE, {})
POLICY = """
version = 1
schemes = ["w6a6"]

[[perplexity]]
text = "wikitext"
percent = 1
"""


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(POLICY)
    return load_accuracy_policy(str(path))


def a_report(*judged: LimitOutcome) -> AccuracyReport:
    return AccuracyReport("tiny", "ab" * 32, "fp16", "mine", COMMIT.sha, "H200", judged)


def test_each_scheme_has_a_record(policy):
    report = a_report(
        LimitOutcome(
            "w6a6", "perplexity of wikitext", GateOutcome.PASS, "", "+1 %", 12.0, 12.1, 0.8
        ),
        LimitOutcome("w4a4", "perplexity of wikitext", GateOutcome.PASS, "", "+1 %"),
        LimitOutcome("w4a4", "parity of kernels", GateOutcome.FAIL, "28 layers", "0.001"),
    )

    found = gate_records(report, policy, ORIGIN, at=NOW)

    assert [(one.scheme, one.verdict, one.exit_code) for one in found] == [
        ("w6a6", "pass", 0),
        ("w4a4", "fail", 1),
    ]
    assert [limit.check for limit in found[1].limits] == [
        "perplexity of wikitext",
        "parity of kernels",
    ]
    assert found[0].limits[0].change == 0.8


def test_failure_outweighs_what_is_not_judged_in_the_record(policy):
    report = a_report(
        LimitOutcome("w6a6", "perplexity of wikitext", GateOutcome.FAIL, "", "+1 %"),
        LimitOutcome("w6a6", "acc of piqa", GateOutcome.NOT_JUDGED, "no data", "-2 points"),
    )

    (found,) = gate_records(report, policy, ORIGIN, at=NOW)

    assert (found.verdict, found.exit_code) == ("fail", 1)


def test_policies_of_one_name_have_separate_records(policy, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(POLICY.replace("percent = 1", "percent = 2"))
    stricter = load_accuracy_policy(str(path))
    report = a_report(LimitOutcome("w6a6", "perplexity of wikitext", GateOutcome.PASS, "", "+1 %"))

    (one,) = gate_records(report, policy, ORIGIN, at=NOW)
    (other,) = gate_records(report, stricter, ORIGIN, at=NOW)

    assert one.policy == other.policy == "mine"
    assert one.policy_hash != other.policy_hash
    assert one.uuid != other.uuid
