"""Series of verdicts and of measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexq_bench.db.writer import series_identity
from flexq_bench.measure import Meter
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.record import build_record
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload


@pytest.mark.parametrize("label", ["flexq-w6a6", "read-6"])
def test_verdict_and_measurement_share_a_series(commits, sha, label):
    meter = Meter("cpu", seed=0)
    case = Case(label, GemmWorkload(1, 32, 128))
    run = new_run("smoke", "manual", [case.key])

    record = build_record(
        case, meter.measure(case), run, commits[sha(1)], meter.device_info, meter.environment
    )

    assert Machine("cpu", meter.device_info).series_of(case) == series_identity(record)


def test_series_of_another_project_are_separate(commits, sha):
    meter = Meter("cpu", seed=0)
    case = Case("empty", GemmWorkload(1, 1, 1))
    run = new_run("acme.tiny", "manual", [case.key])
    theirs = replace(commits[sha(1)], project="acme")

    record = build_record(
        case, meter.measure(case), run, theirs, meter.device_info, meter.environment
    )

    identity = series_identity(record)
    assert identity["project"] == "acme"
    assert Machine("cpu", meter.device_info, "acme").series_of(case) == identity
    assert Machine("cpu", meter.device_info).series_of(case) != identity
