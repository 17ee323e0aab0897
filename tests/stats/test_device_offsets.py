"""Time offsets of GPUs of one kind."""

from __future__ import annotations

import math

import numpy as np

from flexq_bench.stats.device_offsets import device_offsets

NAN = math.nan


def test_offset_of_a_slower_device_is_half_the_difference():
    base = np.array([10.0, 50.0, 200.0, 8.0])

    found = device_offsets({"a": base, "b": base * 1.02})

    assert math.isclose(found["b"].log_offset, math.log(1.02) / 2)
    assert math.isclose(found["a"].log_offset, -found["b"].log_offset)
    assert found["b"].cases == 4


def test_cases_of_a_single_device_do_not_count():
    found = device_offsets({"a": [10, 20, 30, 40], "b": [10, 20, 30, NAN], "c": [NAN] * 4})

    assert set(found) == {"a", "b"}
    assert found["a"].cases == 3


def test_too_few_shared_cases_give_no_offset():
    assert device_offsets({"a": [10, 20, NAN], "b": [10, 20, 30]}) == {}
    assert device_offsets({"a": [10, 20, 30]}) == {}
