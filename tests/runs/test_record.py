"""Conversion of measurements to records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexq_bench.db import queries
from flexq_bench.runs.lifecycle import new_run, open_run, store_results
from flexq_bench.runs.record import build_record
from flexq_bench.runs.worker import MeasuredCase


@pytest.fixture
def record(a_case, a_result, worker, commit):
    run = new_run("smoke", "manual", [])

    def build(case=None, measured=None, attempt=1, commit=commit, run=run):
        device, environment = worker.device, worker.environment
        return build_record(
            case or a_case(), measured or a_result(), run, commit, device, environment, attempt
        )

    return build


def test_record_uuid_depends_on_run_case_and_attempt(record, a_case, a_result):
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


def test_rates_without_time_or_operations_are_null(record, a_case, a_result):
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
def test_only_correct_results_of_clean_trees_are_accepted(
    record, a_result, commit, status, dirty, accepted
):
    found = record(measured=a_result(status=status), commit=replace(commit, dirty=dirty))

    assert found.accepted is accepted


def test_time_with_other_processes_on_the_gpu_is_not_accepted(record, a_result):
    found = record(measured=a_result(extra={"other_processes": 2}))

    assert (found.status, found.accepted, found.median_us) == ("noisy", False, 20.0)
    assert found.detail.startswith("2 other processes computed on this GPU")
    assert record(measured=a_result(extra={"other_processes": 0})).accepted


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"status": "failed", "detail": "bad \x00 pointer", "median_us": None},
            r"bad \x00 pointer",
        ),
        (
            {"status": "failed", "detail": "half a \ud800 letter", "median_us": None},
            r"half a \ud800 letter",
        ),
        ({"median_us": float("nan")}, "median_us is nan"),
        ({"config": {"name": "a\x00b", "bad": float("inf")}}, "config holds what JSON can't"),
        ({"binary_hash": "a\x00"}, "binary_hash holds a NUL"),
    ],
)
def test_unstorable_result_is_a_failed_record(
    record, a_case, a_result, database, commit, worker, changes, told
):
    cases = [a_case(m=1), a_case(m=2)]
    outcomes = [
        MeasuredCase(cases[0], a_result(**changes), worker),
        MeasuredCase(cases[1], a_result(), worker),
    ]
    run = new_run("smoke", "manual", [case.key for case in cases])

    with open_run(database, run, commit) as opened:
        store_results(opened, cases, outcomes, on_record=lambda record: None)

    with database.session() as session:
        poisoned, sound = queries.run_records(session, run.uuid)
    assert (poisoned.status, poisoned.accepted, poisoned.median_us) == ("failed", False, None)
    assert told in poisoned.detail
    assert poisoned.extra["attempt"] == 1
    assert (sound.status, sound.median_us) == ("ok", 20.0)
