"""Outcomes of the performance gate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexq_bench.db import queries
from flexq_bench.exit_codes import ExitCode
from flexq_bench.verdicts.confirmation import CORRECTED
from flexq_bench.workloads.probes import calibrates

WAIVER = """
[[waiver]]
kernels = ["flexq-w6a6"]
reason = "known"
owner = "Ada"
expires = 2026-01-31
"""


def outcomes(report):
    return [str(finding.outcome) for finding in report.findings]


def limit(kernels: str, percent: float) -> str:
    return f'[[limit]]\nkernels = ["{kernels}"]\nslower_percent = {percent}\n'


UNDECIDED = {"ratio": 1.02, "noise": 0.05}


@pytest.mark.parametrize(
    ("kernel", "changes", "policy", "outcome", "code"),
    [
        ("flexq-w6a6", {}, "", "pass", ExitCode.PASS),
        ("flexq-w6a6", {"ratio": 1.05}, "", "regression", ExitCode.REGRESSION),
        ("flexq-w6a6", {"ratio": 1.05, "same_binary": True}, "", "pass", ExitCode.PASS),
        ("flexq-w6a6", {"placements": 0, "same_code": True}, "", "same code", ExitCode.PASS),
        ("flexq-w6a6", UNDECIDED, "", "ambiguous", ExitCode.AMBIGUOUS),
        ("flexq-w6a6", UNDECIDED, limit("flexq-*", 50), "pass", ExitCode.PASS),
        # neither a limit nor a waiver accepts wrong results
        (
            *("flexq-w6a6", {"correct": False}, limit("flexq-*", 1000) + WAIVER),
            *("regression", ExitCode.REGRESSION),
        ),
        ("read-6", {}, "", "probe", ExitCode.PASS),
        ("read-6", {"ratio": 1.06}, "", "probe", ExitCode.PASS),
        ("read-6", UNDECIDED, "", "probe", ExitCode.PASS),
        ("read-6", {"correct": False}, "", "regression", ExitCode.REGRESSION),
        ("read-6", {"placements": 0}, "", "missing", ExitCode.MISSING),
    ],
)
def test_outcome_of_a_case(gate, compared, kernel, changes, policy, outcome, code):
    report = gate(compared(kernel, **changes), compared("cublas-fp16"), policy=policy)

    assert (outcomes(report), report.exit_code) == ([outcome, "pass"], code)


def test_case_that_was_not_measured_to_the_end_is_ambiguous(gate, compared):
    unfinished = replace(compared("flexq-w6a6", placements=0), pairs_needed=6)

    report = gate(unfinished, compared("cublas-fp16"))

    assert (outcomes(report), report.exit_code) == (["ambiguous", "pass"], ExitCode.AMBIGUOUS)
    assert report.findings[0].need == "about 6 pairs of processes would decide it"


def test_slowdown_within_the_kernels_limit_passes(gate, compared):
    policy = f'{limit("flexq-*", 6)}owner = "flexq"\n'

    report = gate(compared("flexq-w6a6", 1.05), compared("cublas-fp16", 1.05), policy=policy)

    assert outcomes(report) == ["pass", "regression"]
    assert report.findings[0].verdict == "slower"
    assert report.findings[0].change == pytest.approx(5, abs=0.2)
    assert [finding.owner for finding in report.findings] == ["flexq", "kernels"]


def test_corrected_base_passes_with_a_note(gate, compared):
    report = gate(compared("flexq-w6a6", 1.5, base_correct=False))

    assert (outcomes(report), report.exit_code) == (["pass"], ExitCode.PASS)
    assert report.compared == 0
    assert f"{report.findings[0].case.key}: {CORRECTED}" in report.notes


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [("read-6", True), ("empty", True), ("spin", False), ("flexq-w6a6", False)],
)
def test_spin_probe_is_judged(kernel, expected):
    assert calibrates(kernel) is expected


def test_limit_that_fits_only_probes_is_noted(gate, compared):
    report = gate(compared("flexq-w6a6"), compared("read-6"), policy=limit("read-*", 5))

    assert "limit of read-* fits no planned case but probes" in report.notes[0]


@pytest.mark.parametrize(
    "changes", [{"placements": 2}, {"placements": 0, "detail": "base has no such kernel"}]
)
def test_planned_case_without_data_is_missing(gate, compared, changes):
    report = gate(compared("flexq-w6a6", **changes), compared("cublas-fp16"))

    assert (outcomes(report), report.exit_code) == (["missing", "pass"], ExitCode.MISSING)
    assert changes.get("detail", "blocks") in report.findings[0].reason


def test_planned_case_without_result_is_missing(gate, compared):
    here, lost = compared("cublas-fp16"), compared("flexq-w6a6")

    report = gate(here, plan=[lost.case, here.case])

    assert outcomes(report) == ["missing", "pass"]
    assert report.findings[0].reason == "no result arrived"
    assert report.exit_code == ExitCode.MISSING


def test_worst_outcome_decides_the_exit_code(gate, compared):
    slow, unclear = compared("flexq-w6a6", 1.05), compared("cublas-fp16", 1.02, noise=0.05)
    lost = compared("flexq-w6a8").case

    assert gate(slow, unclear).exit_code == ExitCode.REGRESSION
    assert gate(slow, unclear, plan=[slow.case, unclear.case, lost]).exit_code == ExitCode.MISSING


@pytest.mark.parametrize(
    "change", [{"ratio": 1.05}, {"ratio": 1.02, "noise": 0.05}, {"placements": 0}]
)
def test_waiver_names_the_finding_it_accepts(gate, compared, change):
    report = gate(compared("flexq-w6a6", **change), policy=WAIVER)

    assert (outcomes(report), report.exit_code) == (["waived"], ExitCode.PASS)
    assert (report.findings[0].waiver.owner, report.findings[0].waiver.reason) == ("Ada", "known")


def test_expired_waiver_is_ignored_and_noted(gate, compared):
    expired = WAIVER.replace("2026-01-31", "2026-01-14")

    report = gate(compared("flexq-w6a6", 1.05), policy=expired)

    assert report.exit_code == ExitCode.REGRESSION
    assert "flexq-w6a6 (Ada: known) expired on 2026-01-14" in report.notes[0]


def test_unused_entries_of_a_policy_are_noted(gate, compared):
    vain = limit("abq-*", 1) + WAIVER.replace("6a6", "6a8")

    report = gate(compared("flexq-w6a6"), policy=vain + WAIVER)

    assert [note.partition(" (")[0].partition(" fits")[0] for note in report.notes] == [
        "waiver of flexq-w6a8", "waiver of flexq-w6a6", "limit of abq-*",
    ]  # fmt: skip
    assert report.exit_code == ExitCode.PASS


def test_entries_of_other_gpus_are_neither_applied_nor_noted(gate, compared):
    elsewhere = f'{limit("flexq*", 50)}gpus = ["*H200*"]\n{WAIVER}gpus = ["*H200*"]\n'

    report = gate(compared("flexq-w6a6", 1.05), policy=elsewhere)

    assert (outcomes(report), report.notes) == (["regression"], ())
    here = gate(compared("flexq-w6a6", 1.05, seed=2), policy=elsewhere.replace("H200", "cpu"))
    assert outcomes(here) == ["pass"]


def test_only_the_watched_branch_opens_alerts(gate, compared, database):
    gate(compared("flexq-w6a6", 1.05))
    with database.session() as session:
        assert queries.alerts(session) == []

    report = gate(compared("flexq-w6a6", 1.05, seed=2), alerting=True)

    with database.session() as session:
        (alert,) = queries.alerts(session)
    assert report.opened == (alert.id,)
