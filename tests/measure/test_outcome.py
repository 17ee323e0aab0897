"""Refusal of times that are too short for reading the weights."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from flexq_bench.measure import PROTOCOL_CUDA, Measured
from flexq_bench.measure.outcome import judge_speed


@pytest.fixture
def timed():
    def build(median_us, **fields):
        result = Measured("ok", "", seed=0, protocol_version=1, input_distribution="")
        times = {"median_us": median_us, "ci_low_us": median_us, "ci_high_us": median_us}
        return replace(result, **(times | fields))

    return build


# Measured on an H200: launches that overlap one another save more than the time of a launch.
@pytest.mark.parametrize(
    ("median_us", "floor_us"), [(1.378, 1.952), (4.088, 4.986), (8.602, 10.076)]
)
def test_overlapping_launches_may_be_faster_than_the_floor(timed, median_us, floor_us):
    measured = timed(median_us)

    assert judge_speed(measured, timed(floor_us), 0.71, PROTOCOL_CUDA) is measured


@pytest.mark.parametrize("share", [531, 200])
def test_time_far_below_the_floor_is_incorrect(timed, share):
    judged = judge_speed(timed(20.7 * 100 / share), timed(20.7), 0.71, PROTOCOL_CUDA)

    assert judged.status == "incorrect"
    assert "faster than reading its weights allows" in judged.detail
    assert f"({share} % of floor)" in judged.detail


def test_time_with_an_interval_above_the_floor_is_accepted(timed):
    wide = timed(5.0, ci_high_us=14.0)

    assert judge_speed(wide, timed(20.7), 0.71, PROTOCOL_CUDA).status == "ok"
    assert judge_speed(wide, timed(30.0, ci_low_us=20.7), 0.71, PROTOCOL_CUDA).status == "ok"


def test_incorrect_result_keeps_its_reason(timed):
    wrong = timed(1.0, status="incorrect", detail="not bit-exact")

    assert judge_speed(wrong, timed(20.7), 0.71, PROTOCOL_CUDA) is wrong


@pytest.mark.parametrize(("cache", "status"), [("cold", "incorrect"), ("hot", "ok")])
def test_floor_limits_cold_weights_only(a_meter, a_case, fake_linear, fake_probe, cache, status):
    class SlowRead(fake_probe):
        def launch(self, operand, config=None):
            time.sleep(0.02)

    meter = a_meter(fake_linear(), probes=(SlowRead("read-6", True),))

    assert meter.measure(a_case(cache=cache)).status == status
