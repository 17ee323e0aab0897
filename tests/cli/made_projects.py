"""The sample repository of examples/byo, with times that its kernels' sources name."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path

from flexq_bench.fleet import pool_choice
from flexq_bench.kernels.external.described import DescribedKernel
from flexq_bench.kernels.external.loading import load
from flexq_bench.measure import Measured, external_kernels
from flexq_bench.measure.ab import course
from flexq_bench.measure.ab.blocks import Block, SampleBatch
from flexq_bench.measure.device import device_info
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.worker import Worker
from flexq_bench.workloads.probes import is_probe

SCRIPT = Path(__file__).parents[2] / "examples" / "byo" / "make_repository.py"
CASE = "acme.torch-w6a8 gemm cold m16n1024k1024"
IDENTITY = (
    *("protocol_version", "input_distribution", "kernel_version"),
    *("weight_bits", "act_bits", "group"),
)
NOISE = random.Random(7)
QUICK = ("--backend", "cpu", "--processes", "1")


def made_repository(folder, percent):
    spec = importlib.util.spec_from_file_location("make_repository", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.make(folder, ("torch",), percent)
    return str(folder)


class Commit:
    """What a commit's kernels are made to do, by the source that its build has."""

    def __init__(self, source):
        text = Path(source.place).read_text()
        self.us = 1000.0 * (1 + int(re.search(r"PADDING_PERCENT = (\d+)", text)[1]) / 100)
        self.is_wrong = "SIGN = -1" in text

    def sample(self, kernel):
        return (1000.0 if is_probe(kernel) else self.us) * NOISE.gauss(1, 0.001)

    def breaks(self, kernel):
        return self.is_wrong and kernel == "acme.torch-w6a8"


class MadeMeter:
    """In place of processes that measure cases."""

    backend = "cpu"

    def __init__(self, options, kernels, protocol=None):
        self.commit = Commit(kernels.sources[0])
        self.machine = Machine("cpu", device_info("cpu"), kernels.sources[0].prefix)
        self.worker = Worker(self.machine.device, {}, None, 1)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def check(self, case):
        pass

    def in_order(self, cases):
        return cases

    def measure(self, case):
        series = self.machine.series_of(case)  # as that of its verdicts
        identity = {name: series[name] for name in IDENTITY}
        if self.commit.breaks(case.kernel):
            return Measured("incorrect", "y[0,0] = -1, expected 1", 0, median_us=1000.0, **identity)
        return Measured("ok", "", 0, median_us=self.commit.sample(case.kernel), **identity)


def made_blocks(_course, lane, pairs, process, count, _spare, *, is_last):
    """In place of two processes that take turns; on a CPU, no other pair gets ready."""
    assert count == 1
    experiment = lane.experiment
    sides = [Commit(side.kernels_from[0]) for side in (experiment.base, experiment.head)]
    for pair in pairs:
        for commit, side in zip(sides, (pair.base, pair.head), strict=True):
            side.wrong = "y[0,0] = -1, expected 1" if commit.breaks(side.case.kernel) else ""
        for placement in range(experiment.rules.placements):
            for _ in range(experiment.rules.blocks):
                base, head = (
                    tuple(
                        SampleBatch((commit.sample(pair.base.case.kernel),), None, True)
                        for _ in "AB"
                    )
                    for commit in sides
                )
                pair.blocks.append(Block(process, placement, base, head))
        pair.processes = process + 1
    return ()


def make_times(monkeypatch):
    """Take the times of kernels of projects from their sources; everything else runs as usual."""

    def described(source, **options):
        return tuple(DescribedKernel(kernel.spec) for kernel in load(source).kernels)

    monkeypatch.setattr(external_kernels, "described", described)
    monkeypatch.setattr(pool_choice, "ProcessMeter", MadeMeter)
    monkeypatch.setattr(course._Course, "_check", lambda *given: ())
    monkeypatch.setattr(course._Course, "_pairs_of_processes", made_blocks)
