"""What runs in a Ray worker process: one meter on one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from flexq_bench.errors import MeasureError
from flexq_bench.execution import Worker, measure_case, worker_of
from flexq_bench.measure import Measured, Meter, Tuning
from flexq_bench.provenance import source_hash
from kernels.contract import Backend
from workloads.case import Case

ROOT = Path(__file__).resolve().parents[2]


class MeterActor:
    """Measures one case at a time on the device that Ray gave this process.

    On a CPU it uses one thread, so that actors beside each other don't share cores.
    """

    def __init__(self, backend: Backend, seed: int, tuning: Tuning) -> None:
        if backend == "cpu":
            torch.set_num_threads(1)
        # Ray shows a process only its own GPU, so that one is always the first.
        device = "cpu" if backend == "cpu" else "cuda:0"
        self._meter = Meter(device, seed=seed, tuning=tuning)

    def describe(self) -> Worker:
        return worker_of(self._meter)

    def sources(self) -> str:
        """Hash of the kernel sources that this process would run."""
        return source_hash(ROOT)

    def check(self, cases: Sequence[Case]) -> str:
        """Why the first case that doesn't fit the memory doesn't; empty: all of them fit."""
        for case in cases:
            try:
                self._meter.check_memory(case)
            except MeasureError as error:
                return str(error)
        return ""

    def measure(self, case: Case) -> Measured:
        """Raises InfrastructureError if the device is broken: a fresh process must go on."""
        return measure_case(self._meter, case)
