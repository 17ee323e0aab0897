"""Outcomes of the performance gate."""

from __future__ import annotations

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


def test_unchanged_case_passes(gate, compared):
    report = gate(compared("flexq-w6a6"), compared("cublas-fp16"))

    assert (outcomes(report), report.exit_code) == (["pass", "pass"], ExitCode.PASS)


def test_slowdown_beyond_the_limit_fails(gate, compared):
    report = gate(compared("flexq-w6a6", 1.05), compared("cublas-fp16"))

    assert (outcomes(report), report.exit_code) == (["regression", "pass"], ExitCode.REGRESSION)
    assert report.findings[0].change == pytest.approx(5, abs=0.2)


def test_slowdown_within_the_kernels_limit_passes(gate, compared):
    limit = '[[limit]]\nkernels = ["flexq-*"]\nslower_percent = 6\nowner = "flexq"\n'

    report = gate(compared("flexq-w6a6", 1.05), compared("cublas-fp16", 1.05), policy=limit)

    assert outcomes(report) == ["pass", "regression"]
    assert report.findings[0].verdict == "slower"
    assert [finding.owner for finding in report.findings] == ["flexq", "kernels"]


def test_wrong_result_fails_at_any_limit(gate, compared):
    limit = '[[limit]]\nkernels = ["flexq-*"]\nslower_percent = 1000\n'

    report = gate(compared("flexq-w6a6", correct=False), policy=limit + WAIVER)

    assert (outcomes(report), report.exit_code) == (["regression"], ExitCode.REGRESSION)


def test_corrected_base_passes_with_a_note(gate, compared):
    report = gate(compared("flexq-w6a6", 1.5, base_correct=False))

    assert (outcomes(report), report.exit_code) == (["pass"], ExitCode.PASS)
    assert report.compared == 0
    assert f"{report.findings[0].case.key}: {CORRECTED}" in report.notes


@pytest.mark.parametrize("changes", [{}, {"ratio": 1.06}, {"ratio": 1.02, "noise": 0.05}])
def test_floor_is_not_judged(gate, compared, changes):
    report = gate(compared("flexq-w6a6"), compared("read-6", **changes))

    assert (outcomes(report), report.exit_code) == (["pass", "probe"], ExitCode.PASS)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"correct": False}, ExitCode.REGRESSION), ({"placements": 0}, ExitCode.MISSING)],
)
def test_wrong_or_missing_floor_fails(gate, compared, changes, code):
    assert gate(compared("flexq-w6a6"), compared("read-6", **changes)).exit_code == code


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [("read-6", True), ("empty", True), ("spin", False), ("flexq-w6a6", False)],
)
def test_spin_probe_is_judged(kernel, expected):
    assert calibrates(kernel) is expected


def test_limit_that_fits_only_probes_is_noted(gate, compared):
    limit = '[[limit]]\nkernels = ["read-*"]\nslower_percent = 5\n'

    report = gate(compared("flexq-w6a6"), compared("read-6"), policy=limit)

    assert "limit of read-* fits no planned case but probes" in report.notes[0]


def test_undecided_case_is_ambiguous(gate, compared):
    report = gate(compared("flexq-w6a6", 1.02, noise=0.05))

    assert (outcomes(report), report.exit_code) == (["ambiguous"], ExitCode.AMBIGUOUS)


def test_undecided_case_within_its_limit_passes(gate, compared):
    limit = '[[limit]]\nkernels = ["flexq-*"]\nslower_percent = 50\n'

    report = gate(compared("flexq-w6a6", 1.02, noise=0.05), policy=limit)

    assert report.findings[0].verdict == "ambiguous"
    assert report.exit_code == ExitCode.PASS


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


def test_same_machine_code_passes(gate, compared):
    report = gate(compared("flexq-w6a6", 1.05, same_binary=True))

    assert (report.findings[0].cause, report.exit_code) == ("environment", ExitCode.PASS)


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
    vain = '[[limit]]\nkernels = ["abq-*"]\nslower_percent = 1\n' + WAIVER.replace("6a6", "6a8")

    report = gate(compared("flexq-w6a6"), policy=vain + WAIVER)

    assert [note.partition(" (")[0].partition(" fits")[0] for note in report.notes] == [
        "waiver of flexq-w6a8", "waiver of flexq-w6a6", "limit of abq-*",
    ]  # fmt: skip
    assert report.exit_code == ExitCode.PASS


def test_only_the_watched_branch_opens_alerts(gate, compared, database):
    gate(compared("flexq-w6a6", 1.05))
    with database.session() as session:
        assert queries.alerts(session) == []

    report = gate(compared("flexq-w6a6", 1.05, seed=2), alerting=True)

    with database.session() as session:
        (alert,) = queries.alerts(session)
    assert report.opened == (alert.id,)
