"""Kernels that skip work between announced checks are incorrect: their inputs change in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cheats import ON_DEVICE, ON_HOST, Honest


@pytest.fixture
def a_cheat_case(a_case):
    def build(**fields):
        return a_case(m=4, n=256, k=256, kernel="cheat", **fields)

    return build


@pytest.mark.parametrize("cache", ["cold", "hot"])
@pytest.mark.parametrize("stage", ["gemm", "linear"])
@pytest.mark.parametrize("cheat", [*ON_DEVICE, *ON_HOST])
def test_a_kernel_that_skips_work_is_incorrect(a_meter, a_cheat_case, cheat, stage, cache):
    protocol = replace(a_meter().protocol, min_device_s=0.1)  # every copy has its turn often
    meter = a_meter(cheat(), protocol=protocol)

    measured = meter.measure(a_cheat_case(stage=stage, cache=cache))

    assert measured.status == "incorrect"
    assert "inputs that change in place" in measured.detail
    assert measured.exact is True  # the checks that announce themselves found nothing


@pytest.mark.parametrize("cache", ["cold", "hot"])
@pytest.mark.parametrize("stage", ["gemm", "linear"])
def test_the_same_kernel_without_the_shortcut_is_ok(a_meter, a_cheat_case, stage, cache):
    measured = a_meter(Honest()).measure(a_cheat_case(stage=stage, cache=cache))

    assert (measured.status, measured.detail, measured.exact) == ("ok", "", True)
