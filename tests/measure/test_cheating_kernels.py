"""Kernels that skip work between announced checks are incorrect: their inputs change in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cheats import (
    ON_DEVICE,
    ON_HOST,
    ByContentOfActivations,
    EveryThird,
    Honest,
    UnlessNan,
)

# Whatever this CPU has: cold is then three copies of 512 KiB, each launched on often.
L2_BYTES = {"cold": 1 << 16, "hot": 1 << 20}

# Which comes first is chance: what recurs in a placement is drawn by lot.
REASONS = ("wrong on inputs that change in place between samples", "results are remembered")


@pytest.fixture
def measured(a_meter, a_case):
    def run(kernel, cache, stage="gemm"):
        meter = a_meter(kernel, protocol=replace(a_meter().protocol, min_samples=200))
        meter.device_info = replace(meter.device_info, l2_bytes=L2_BYTES[cache])
        return meter.measure(a_case(m=4, n=256, k=256, kernel="cheat", cache=cache, stage=stage))

    return run


@pytest.mark.parametrize("cache", ["cold", pytest.param("hot", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cheat", [*ON_DEVICE, *ON_HOST])
def test_a_kernel_that_skips_work_is_incorrect(measured, cheat, cache):
    result = measured(cheat(), cache)

    assert result.status == "incorrect"
    assert any(reason in result.detail for reason in REASONS), result.detail
    assert result.exact is True  # the checks that announce themselves found nothing


@pytest.mark.parametrize("cheat", [UnlessNan, EveryThird, ByContentOfActivations])
def test_so_is_one_that_is_given_real_activations(measured, cheat):
    result = measured(cheat(), "hot", "linear")

    assert result.status == "incorrect"
    assert any(reason in result.detail for reason in REASONS), result.detail


def test_a_kernel_that_changes_its_own_spec_is_incorrect(measured):
    cheat = Honest()
    cheat.spec = replace(cheat.spec)
    multiply = cheat.gemm

    def less_exact(x, w, out, **named):
        object.__setattr__(cheat.spec, "rounds_to", 1)
        multiply(x, w, out, **named)

    cheat.gemm = less_exact
    result = measured(cheat, "hot")

    assert result.status == "incorrect"
    assert "its code changed the spec of " in result.detail


@pytest.mark.parametrize("cache", ["cold", "hot"])
@pytest.mark.parametrize("stage", ["gemm", "linear"])
def test_the_same_kernel_without_a_shortcut_is_ok(measured, cache, stage):
    result = measured(Honest(), cache, stage)

    assert (result.status, result.detail, result.exact) == ("ok", "", True)
    assert result.extra["copies"] == {"cold": 3, "hot": 1}[cache]
