"""Operators that the measurement calls are watched, also those behind a function of torch."""

from __future__ import annotations

import pytest
from torch.profiler import ProfilerActivity, profile

from flexq_bench.measure import tampering


@pytest.mark.slow
def test_every_operator_that_a_measurement_calls_is_watched(a_meter, a_case, fake_linear):
    kernel = fake_linear()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        result = a_meter(kernel).measure(a_case(kernel=kernel.spec.name, cache="hot"))
    called = {one.key for one in profiled.key_averages() if one.key.startswith("aten::")}

    tampering.watch()
    watched = {name.removeprefix("the operator ").partition(".")[0] for name in tampering._known}
    tampering.forget()

    assert result.status == "ok"
    assert called - watched == set()
