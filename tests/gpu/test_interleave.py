"""Taking turns on a GPU: the probe of known length, and two kernels in one worker."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.registry import resolve
from flexq_bench.measure.ab import InterleaveRules, compare_kernels
from flexq_bench.verdicts import Verdict
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

pytestmark = pytest.mark.alone


def test_the_spin_waits_its_cycles():
    probe = resolve("spin", "cuda")
    operand = probe.allocate(GemmWorkload(1, 1, 1), torch.device("cuda:0"), 0)

    assert probe.check(operand).exact


def test_kernel_is_as_fast_as_itself():
    rules = InterleaveRules.with_processes(1)
    case = Case.from_key("flexq-w6a6 gemm cold m4n4096k4096")

    (found,) = compare_kernels("flexq-w6a6", "flexq-w6a6", [case], rules=rules)

    assert found.confirmation.verdict in (Verdict.SAME, Verdict.AMBIGUOUS)
    assert abs(found.confirmation.log_ratio) < 0.02
    assert found.comparison.base_mhz is not None
    assert found.base_binary == found.head_binary is not None
