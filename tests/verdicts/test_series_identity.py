"""A verdict is about the series that the measured times are in."""

from __future__ import annotations

import pytest

from db.writer import series_identity
from flexq_bench.measure import Meter
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.record import build_record
from workloads.case import Case
from workloads.gemm import GemmWorkload


@pytest.mark.parametrize("label", ["flexq-w6a6", "read-6"])
def test_a_verdict_and_a_measurement_of_a_case_share_a_series(commits, sha, label):
    meter = Meter("cpu", seed=0)
    case = Case(label, GemmWorkload(1, 32, 128))
    run = new_run("smoke", "manual", [case.key])

    record = build_record(
        case, meter.measure(case), run, commits[sha(1)], meter.device_info, meter.environment
    )

    assert Machine("cpu", meter.device_info).series_of(case) == series_identity(record)
