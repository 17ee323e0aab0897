"""On a GPU, where launches are captured once: skipping work is incorrect, honest kernels are ok."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cheats import (
    EveryThird,
    HalfOfIt,
    HalfOfTheRows,
    Honest,
    LastResult,
    OnAnotherStream,
    UnlessNan,
)

from flexq_bench.kernels import registry
from flexq_bench.measure import PROTOCOL_CUDA, Meter
from flexq_bench.measure.tuning import Tuning
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

BRIEF = replace(PROTOCOL_CUDA, budget_s=1.0)  # its time is not what is tested


@pytest.fixture
def measured():
    def run(kernel, **fields):
        def resolve(label, backend):
            return kernel if label == "cheat" else registry.resolve(label, backend)

        meter = Meter("cuda:0", BRIEF, resolve=resolve, tuning=Tuning.NONE)
        return meter.measure(Case("cheat", GemmWorkload(4, 1024, 1024), **fields))

    return run


@pytest.mark.parametrize("cache", ["cold", "hot"])
@pytest.mark.parametrize("cheat", [UnlessNan, EveryThird, HalfOfIt, HalfOfTheRows, LastResult])
def test_a_kernel_that_skips_work_is_incorrect(measured, cheat, cache):
    result = measured(cheat("cuda"), cache=cache)

    assert result.status == "incorrect"
    assert "wrong on inputs that change in place between samples" in result.detail


@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_work_on_an_unjoined_stream_is_incorrect_or_refused(measured, cache):
    result = measured(OnAnotherStream("cuda"), cache=cache)

    assert result.status in ("incorrect", "failed")


@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_the_same_kernel_without_a_shortcut_is_right(measured, cache):
    result = measured(Honest("cuda"), cache=cache)

    assert result.status in ("ok", "noisy"), result.detail
    assert result.exact is True


@pytest.mark.parametrize("label", ["flexq", "flexq-w6a6", "cublaslt-w8a8", "cublas-fp16", "w4a16"])
@pytest.mark.parametrize(("m", "cache"), [(1, "cold"), (1, "hot"), (64, "cold")])
@pytest.mark.parametrize("stage", ["gemm", "linear"])
def test_registered_kernels_are_correct_on_changing_inputs(label, m, cache, stage):
    meter = Meter("cuda:0", BRIEF, tuning=Tuning.NONE)

    result = meter.measure(Case(label, GemmWorkload(m, 4096, 4096), cache=cache, stage=stage))

    assert result.status in ("ok", "noisy"), result.detail
