"""From a measurement to its record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexq_bench.runs.lifecycle import new_run
from flexq_bench.runs.record import build_record


@pytest.fixture
def record(a_case, a_result, worker, commit):
    run = new_run("smoke", "manual", [])

    def build(case=None, measured=None, attempt=1, commit=commit, run=run):
        device, environment = worker.device, worker.environment
        return build_record(
            case or a_case(), measured or a_result(), run, commit, device, environment, attempt
        )

    return build


def test_the_identity_is_of_run_case_and_attempt_alone(record, a_case, a_result):
    same = record(measured=a_result(median_us=30.0))
    others = [
        record(case=a_case(m=2)),
        record(attempt=2),
        record(run=new_run("smoke", "manual", [])),
    ]

    assert same.uuid == record().uuid
    assert len({record().uuid, *(other.uuid for other in others)}) == 4


def test_rates_follow_from_the_median(record, a_case, a_result):
    found = record(case=a_case(m=1, n=1000, k=1000), measured=a_result(median_us=4.0, floor_us=3.0))

    assert found.pct_of_floor == pytest.approx(75.0)
    assert found.tops == pytest.approx(0.5)  # 2·10^6 operations in 4 us


def test_rates_are_null_where_nothing_was_timed_or_there_is_nothing_to_count(
    record, a_case, a_result
):
    untimed = record(measured=a_result(status="failed", detail="x", median_us=None))
    floor = record(case=a_case("read-6"))

    assert (untimed.pct_of_floor, untimed.tops) == (None, None)
    assert floor.tops is None


@pytest.mark.parametrize(
    ("status", "dirty", "accepted"),
    [
        ("ok", False, True),
        ("noisy", False, True),
        ("incorrect", False, False),
        ("failed", False, False),
        ("ok", True, False),
    ],
)
def test_only_right_results_of_a_clean_tree_are_accepted(
    record, a_result, commit, status, dirty, accepted
):
    found = record(measured=a_result(status=status), commit=replace(commit, dirty=dirty))

    assert found.accepted is accepted
