"""Speed-ups and shares of the floor, with their intervals."""

from __future__ import annotations

import dataclasses
import math

import pytest

from flexq_bench.runs.lifecycle import new_run
from flexq_bench.runs.record import build_record
from flexq_bench.stats import Interval
from flexq_bench.stats.baseline import compare_with_baseline, half_width_percent


@pytest.fixture
def result(a_case, a_result, worker, commit):
    run = new_run("smoke", "manual", [])

    def build(kernel="flexq-w6a6", median_us=20.0, *, m=1, half_width=0.0, gpu="A", **measured):
        times = {
            "median_us": median_us,
            "ci_low_us": median_us - half_width,
            "ci_high_us": median_us + half_width,
        }
        device = dataclasses.replace(worker.device, sku=gpu)
        found = a_result(**times | measured)
        return build_record(a_case(kernel, m), found, run, commit, device, worker.environment)

    return build


def of_kernel(rows, kernel):
    (row,) = (row for row in rows if row.result.kernel == kernel)
    return row


def test_speedup_is_over_the_same_case_and_gpu(result):
    rows = compare_with_baseline(
        [
            result("cublaslt-w8a8", 40.0, m=1),
            result("cublaslt-w8a8", 80.0, m=8),
            result("cublaslt-w8a8", 15.0, m=1, gpu="B"),
            result("flexq-w6a6", 10.0, m=1),
            result("flexq-w6a6", 10.0, m=8),
            result("flexq-w6a6", 10.0, m=1, gpu="B"),
        ]
    )

    found = {
        (row.result.gpu, row.result.m): row.speedup.estimate
        for row in rows
        if row.result.kernel == "flexq-w6a6"
    }
    assert found == pytest.approx({("A", 1): 4.0, ("A", 8): 8.0, ("B", 1): 1.5})


def test_baseline_has_speedup_one(result):
    results = [
        result("cublaslt-w8a8", 40.0, half_width=1.0),
        result("flexq-w6a6", 10.0, half_width=1.0),
    ]

    rows = compare_with_baseline(results, "flexq-w6a6")

    assert of_kernel(rows, "cublaslt-w8a8").speedup.estimate == pytest.approx(0.25)
    assert of_kernel(rows, "flexq-w6a6").speedup == Interval(1.0, 1.0, 1.0)


@pytest.mark.parametrize("wrong", ["cublaslt-w8a8", "flexq-w6a6"])
def test_wrong_result_has_no_speedup(result, wrong):
    rows = compare_with_baseline(
        [
            result(kernel, status="incorrect" if kernel == wrong else "ok")
            for kernel in ("cublaslt-w8a8", "flexq-w6a6")
        ]
    )

    assert of_kernel(rows, "flexq-w6a6").speedup is None
    assert of_kernel(rows, wrong).pct_of_floor is None


def test_both_intervals_widen_the_speedup(result):
    narrow = compare_with_baseline([result("cublaslt-w8a8"), result(half_width=0.2)])
    wide = compare_with_baseline([result("cublaslt-w8a8", half_width=0.2), result(half_width=0.2)])

    def width(rows):
        speedup = of_kernel(rows, "flexq-w6a6").speedup
        return speedup.high - speedup.low

    assert width(narrow) == pytest.approx(0.02, rel=0.01)
    assert width(wide) == pytest.approx(0.02 * math.sqrt(2), rel=0.01)


def test_share_of_floor_has_the_uncertainty_of_the_probe(result):
    probe = result("read-6", 11.0, half_width=1.1, floor_us=None)

    alone = compare_with_baseline([result(floor_us=10.0)])
    beside = compare_with_baseline([probe, result(floor_us=10.0)])

    assert of_kernel(alone, "flexq-w6a6").pct_of_floor == Interval(
        *map(pytest.approx, (50.0, 50.0, 50.0))
    )
    share = of_kernel(beside, "flexq-w6a6").pct_of_floor
    assert (share.estimate, share.low, share.high) == pytest.approx((50.0, 45.0, 55.0))
    assert of_kernel(beside, "read-6").pct_of_floor is None


def test_half_width_is_in_percent_of_the_median(result):
    assert half_width_percent(result(median_us=20.0, half_width=1.0)) == pytest.approx(5.0)
    assert half_width_percent(result(ci_low_us=None)) is None
